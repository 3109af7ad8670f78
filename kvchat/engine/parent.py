"""Ties the engine to the process that started it: it ends when that ends, for any reason, and writes to it alone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process, even a stopped one, as soon as its parent is gone; end if it is gone already.

    ``parent`` is its process id: whoever is orphaned before this call hears of no death. Only Linux can do that;
    elsewhere a process ends by the end of its stdin, which needs it to run. The parent is the thread that started the
    process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent not in (None, os.getppid()):
            sys.exit()


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for the protocol alone: what a library prints goes to stderr, what it asks for is empty."""
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return commands, events
