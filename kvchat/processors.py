"""The time that the processors have spent which this process may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROCESSES = Path("/proc")
STAT = PROCESSES / "stat"


class Spent(NamedTuple):
    """Seconds since the machine's start, of all ``processors`` together: all there were, and those without work."""

    total: float
    idle: float
    processors: int


def spent(stat: Path = STAT) -> Spent | None:
    """Read what was spent until now; None where the system does not tell."""
    try:
        told = stat.read_text()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [fields for fields in map(str.split, told.splitlines()) if fields[:1] and fields[0] in usable]
    if not lines:
        return None
    # User, nice, system, idle, waiting for a disk, interrupts, soft ones, stolen; a guest's time is part of the first.
    ticks = [[int(field) for field in fields[1:9]] for fields in lines]
    second = os.sysconf("SC_CLK_TCK")
    return Spent(sum(map(sum, ticks)) / second, sum(each[3] + each[4] for each in ticks) / second, len(lines))
