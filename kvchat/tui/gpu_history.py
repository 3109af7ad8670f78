"""NVML's readings of the GPU in the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvchat.protocol.figures import Gpu
from kvchat.protocol.messages import Details

EVERY_S = 1.0
POINTS = 240


@dataclass(frozen=True)
class Moment:
    """Memory in use and all there is, in bytes, use in percent, watts, and bytes per second over the PCIe link."""

    used: int | None = None
    total: int | None = None
    utilization: int | None = None
    power: float | None = None
    pcie: int | None = None

    @property
    def is_empty(self) -> bool:
        """NVML said nothing."""
        return self == Moment()


class GpuHistory:
    """At most one moment a second, the oldest first; ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.moments: deque[Moment] = deque(maxlen=POINTS)
        self._clock = clock
        self._noted = float("-inf")

    def note(self, gpu: Gpu | None, details: Details | None) -> None:
        """Add a reading; the PCIe traffic is known only while details are shown."""
        if gpu is None or self._clock() - self._noted < EVERY_S:
            return
        directions = (details.pcie_to_device, details.pcie_to_host) if details else ()
        known = [one for one in directions if one is not None]
        moment = Moment(gpu.used, gpu.total, gpu.utilization, gpu.power, sum(known) if known else None)
        if not moment.is_empty:
            self.moments.append(moment)
            self._noted = self._clock()
