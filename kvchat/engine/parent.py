"""The engine ends with the process that started it, however that ends."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process, even a stopped one, as soon as its parent is gone.

    Only Linux can do that; elsewhere a process ends by the end of its stdin, which needs it to run. The parent is the
    thread that started the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
