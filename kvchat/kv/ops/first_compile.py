"""Compiling the loops of a CPU before they are needed: the first time on a machine it takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from platformdirs import user_cache_path

from kvchat.kv.ops.cpu_products import compiled_loops, loops_over

FILE, LOOP = Path(__file__).with_name("compiled_scattered.py"), "sums"  # what is compiled last


def compile_loops(dtype: torch.dtype, tell: Callable[[], None]) -> None:
    """Compile the loops for K/V of ``dtype`` that are in no cache of numba's; ``tell`` is called before, if any.

    An answer that asks for them first, or that is switched to a mode with loops of its own, would stand still so long.
    """
    written, kinds = FILE.stat().st_mtime, 2 if dtype == torch.bfloat16 else 1  # they are compiled for float32 too
    if any(len([path for path in kept if path.stat().st_mtime >= written]) >= kinds for kept in _kept()):
        return
    tell()
    if compiled_loops():
        from kvchat.kv.ops import (  # noqa: F401  # importing them compiles
            compiled_eight_bit,
            compiled_freeze,
            compiled_in_a_row,
            compiled_scattered,
        )

        loops_over(dtype)
        for path in chain(*_kept()):
            with suppress(OSError):
                path.touch()  # numba goes by what is written in a file, and keeps this of one that was touched


def _kept() -> Iterator[list[Path]]:
    """The files that numba keeps of the last loop, folder by folder: beside the source, in the user's cache."""
    name = f"{FILE.stem}.{LOOP}-*.py{sys.version_info.major}{sys.version_info.minor}.*.nbc"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        folders = [*Path(chosen).glob("*")]
    else:
        folders = [FILE.parent / "__pycache__", *user_cache_path("numba", appauthor=False).glob("*")]
    for folder in folders:
        yield [*folder.glob(name)]
