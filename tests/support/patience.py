"""How long tests wait for what must happen: so long that even a busy machine never needs all of it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object], reason: Callable[[], str] = lambda: "") -> None:
    """Wait for a condition in a test without an event loop; if it stays false, ``reason`` says why."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {reason()}"
        time.sleep(0.01)
