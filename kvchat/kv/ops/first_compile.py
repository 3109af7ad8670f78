"""Compiling the loops of a CPU before they are needed: the first time on a machine it takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from kvchat.kv.ops.cpu_products import compiled_loops

FILE, LOOP = Path(__file__).with_name("compiled_scattered.py"), "sums"  # what is compiled last


def compile_loops(tell: Callable[[], None]) -> None:
    """Compile the loops that are in no cache of numba's; ``tell`` is called before, if there are any.

    An answer that asks for them first, or that is switched to a mode with loops of its own, would stand still so long.
    """
    written = FILE.stat().st_mtime
    if any(index.stat().st_mtime >= written for index in _indices()):
        return
    tell()
    if compiled_loops():
        from kvchat.kv.ops import (  # noqa: F401  # importing them compiles
            compiled_eight_bit,
            compiled_freeze,
            compiled_in_a_row,
            compiled_scattered,
        )

        for index in _indices():
            with suppress(OSError):
                index.touch()  # numba goes by what is written in a file, and leaves the index of one that was touched


def _indices() -> Iterator[Path]:
    """The indices of numba that know the last loop: beside its file, and in the user's cache folder."""
    kept = f"{FILE.stem}.{LOOP}-*.py{sys.version_info.major}{sys.version_info.minor}.nbi"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        folders = [*Path(chosen).glob("*")]
    else:
        folders = [FILE.parent / "__pycache__", *user_cache_path("numba", appauthor=False).glob("*")]
    for folder in folders:
        yield from folder.glob(kept)
