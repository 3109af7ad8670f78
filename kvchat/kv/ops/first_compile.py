"""Compiling the loops of a CPU before they are needed: the first time on a machine it takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from kvchat.kv.ops.cpu_ops import compiled_loops

FILE, LOOP = Path(__file__).with_name("compiled_freeze.py"), "close"  # what is compiled last


def compile_loops(tell: Callable[[], None]) -> None:
    """Compile the loops that are in no cache of numba's; ``tell`` is called before, if there are any.

    An answer that asks for them first, or that is switched to a mode with loops of its own, would stand still so long.
    """
    if _are_cached():
        return
    tell()
    if compiled_loops():
        from kvchat.kv.ops import compiled_freeze  # noqa: F401  # importing it compiles


def _are_cached() -> bool:
    """True if numba's cache has the last loop of the present file: beside it, or in the user's cache folder."""
    kept = f"{FILE.stem}.{LOOP}-*.py{sys.version_info.major}{sys.version_info.minor}.nbi"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        folders = [*Path(chosen).glob("*")]
    else:
        folders = [FILE.parent / "__pycache__", *user_cache_path("numba", appauthor=False).glob("*")]
    written = FILE.stat().st_mtime
    return any(index.stat().st_mtime >= written for folder in folders for index in folder.glob(kept))
