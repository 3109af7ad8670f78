"""A thread whose start is checked."""

from __future__ import annotations

import _thread
import atexit
import threading
from collections.abc import Callable

BEGINS_S = 5.0


class CheckedThread:
    """Runs ``work`` on a new thread. ``threading.Thread`` would wait forever for one that finds no memory to start.

    The process waits for it before it exits: torch aborts a process that exits while a thread copies.

    Raises:
        MemoryError: it did not begin.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._begun, self._over = threading.Event(), threading.Event()
        self._work = work
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:  # the system refuses one
            raise MemoryError(str(error)) from None
        if not self._begun.wait(BEGINS_S):
            self._work = lambda: None  # should it begin after all
            raise MemoryError("a thread could not begin")

    @property
    def is_over(self) -> bool:
        """True once the work has ended."""
        return self._over.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the work has ended, at most ``seconds``."""
        self._over.wait(seconds)

    def _run(self) -> None:
        self._begun.set()
        atexit.register(self.join)
        try:
            self._work()
        finally:
            self._over.set()
            atexit.unregister(self.join)
