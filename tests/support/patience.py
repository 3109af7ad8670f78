"""How long tests wait for what must come: long enough for a machine that does much else, and never to the end there."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object], told: Callable[[], str] = lambda: "") -> None:
    """Wait for a condition in a test without an event loop; ``told`` says why it did not come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {told()}"
        time.sleep(0.01)
