"""Collect garbage in full while the application is idle: with a long answer on the screen a collection takes 0.2 s.

Python's own rule counts new objects, so that it stops the screen while an answer streams, which is when most are made.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

LATE = 200  # collections of the middle generation before a full one that does not wait for a pause; Python's rule: 10
WORTHWHILE = 5
PAUSE_S = 2.0


def postpone_full_collections() -> None:
    """Let full collections come late, and look through what is there now, all modules for example, never again."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, LATE)
    gc.freeze()


class IdleCollector:
    """Collects in pauses: nothing was done for ``PAUSE_S`` and ``is_busy`` is false."""

    def __init__(self, is_busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._used_at = clock()

    def note_use(self) -> None:
        """The user did something: the pause begins again."""
        self._used_at = self._clock()

    def look(self) -> None:
        """Collect if there is a pause and enough was made since the last time; called every second."""
        if self._is_busy():
            self.note_use()
        elif self._clock() - self._used_at >= PAUSE_S and gc.get_count()[2] >= WORTHWHILE:
            gc.collect()
