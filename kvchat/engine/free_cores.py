"""The threads of short parallel loops: as many as other processes leave cores for.

Each loop waits for its last thread. Beside a busy process there is always one that waits for a core, and all others
with it: on two cores beside two busy processes a token of the bundled model, some hundred such loops, took 10 ms on two
threads and 6.8 on one. Loading a model is made of such loops too: the tests of the bundled one took 11.5 and 0.5 s. A
prompt's are long; it is read on all threads.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from kvchat import processors

# Seconds between two looks: ten ticks of the kernel's clock, which it counts a processor's time in.
LOOK_S = 0.1
PAUSE_S = 1.0  # between two answers
# Of a core: others that take no more share it. The application takes a quarter while it draws an answer, and a terminal
# must draw it too; a busy process that shares its core with one of our threads has two thirds.
SHARED = 0.6
FIXED = "OMP_DYNAMIC"


class FreeCores:
    """Inside this context torch computes on the threads that have a core of their own, outside on all that it had.

    Where the device is no CPU, or ``OMP_DYNAMIC=false`` says that the number is not to change, nothing happens.
    ``pause`` is in seconds: after a longer one what others did in it says nothing about now.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
        stat: Path = processors.STAT,
        pause: float = PAUSE_S,
    ) -> None:
        self.threads = self._most = torch.get_num_threads()
        fixed = os.environ.get(FIXED, "").strip().lower() in ("false", "0")
        self._looks = device.type == "cpu" and self._most > 1 and not fixed
        self._clock, self._own, self._stat, self._pause = clock, own, stat, pause
        self._seen: tuple[float, processors.Spent | None, float] = -math.inf, None, 0.0

    def __enter__(self) -> None:
        self.look()
        if self._looks:
            torch.set_num_threads(self.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._looks:
            torch.set_num_threads(self._most)

    def look(self) -> None:
        """See what others took since the last look, unless that was just before."""
        now, (then, before, own) = self._clock(), self._seen
        if not self._looks or now - then < LOOK_S:
            return
        after, own_now = processors.spent(self._stat), self._own()
        self._seen = now, after, own_now
        if after is None or before is None or now - then > self._pause or after.total <= before.total:
            return
        busy = (after.total - before.total) - (after.idle - before.idle) - (own_now - own)
        others = busy / (after.total - before.total) * after.processors
        self.threads = max(1, min(self._most, math.floor(after.processors - others + SHARED)))
