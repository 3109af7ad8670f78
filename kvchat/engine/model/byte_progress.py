"""The progress of a download or of reading weights, in words for a person."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvchat.units import seconds, size

REPORT_S = 1.0
SPEED_SAMPLES = 20


class ByteProgress:
    """Tells at most once a second how much of the work ``doing`` is done, its speed and the time left."""

    def __init__(self, report: Callable[[str], None], doing: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._doing, self._clock = report, doing, clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SPEED_SAMPLES)
        self._ended = False

    def end(self) -> None:
        """Tell nothing more: the library's bars speak once more when they are collected, whatever is done then."""
        self._ended = True

    def tell(self, done: float, total: float) -> None:
        """``Downloading 1.4 GiB of 2.8 GiB · 45.0 MiB/s · 32.0 s left``."""
        now = self._clock()
        too_soon = self._samples and now - self._samples[-1][0] < REPORT_S and done < total
        if self._ended or too_soon:
            return
        self._samples.append((now, done))
        began, first = self._samples[0]
        text = f"{self._doing} {size(done)} of {size(total)}"
        if now - began >= REPORT_S and done > first:
            rate = (done - first) / (now - began)
            text += f" · {size(rate)}/s · {seconds((total - done) / rate)} left"
        self._report(text)
