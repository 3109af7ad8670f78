"""The environment of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join((str(TESTS.parent), str(TESTS)))


def environ(**changes: str) -> dict[str, str]:
    """This process's environment with ``changes``; imports ``kvchat`` and ``support`` from this tree."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH, **changes}
