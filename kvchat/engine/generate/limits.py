"""Work of foreign programs, such as chat templates, that is stopped when it takes too long or too much memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvchat import units
from kvchat.engine.checked_thread import CheckedThread
from kvchat.process import resident_bytes

Result = TypeVar("Result")

POLL_S = 0.02
LOOKS = 100  # turns of a loop: at each the interpreter looks for errors that another thread has set


class LimitExceededError(Exception):
    """Raised inside the work that is stopped; its text says what was too much."""


class _StoppedError(Exception):
    """Raised in the worker thread to stop it."""


def limited(work: Callable[[], Result], seconds: float, nbytes: int) -> Result:
    """Return ``work()``; stop it after ``seconds``, or once the process has grown by ``nbytes``.

    It is stopped between two operations of the interpreter: a single long one runs to its end. Where the system does
    not tell a process's memory only the time is limited.

    Raises:
        LimitExceededError: it was stopped; MemoryError: it asked for more than there is.
    """
    reasons: list[str] = []
    done, worker = threading.Event(), ctypes.c_ulong(threading.get_ident())
    ends, largest = time.monotonic() + seconds, (resident_bytes() or 0) + nbytes

    def watch() -> None:
        while not done.wait(POLL_S):
            if time.monotonic() > ends:
                reasons.append(f"It takes more than {units.seconds(seconds)}")
            elif (resident_bytes() or 0) > largest:
                reasons.append(f"It takes more than {units.size(nbytes, 0)} of memory")
            if reasons:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(worker, ctypes.py_object(_StoppedError))
                return

    watcher = CheckedThread(watch)
    try:
        try:
            return work()
        finally:
            done.set()
            watcher.join()
            # One that came too late is raised here. Taking it back (None) would leave Python 3.11's flag of such errors
            # set for good: every call then looks for one, and a traced generator never goes on.
            for _ in range(LOOKS if reasons else 0):
                pass
    except _StoppedError:
        raise LimitExceededError(reasons[0]) from None
