"""The load beside a measurement: processes started for it, and the share that all others took.

A time says nothing without it: on a machine that does something else every figure is another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvchat import process as process_module
from kvchat.process import PROCESSES, STAT

# Ends by itself when its parent has ended, however that came.
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
# Seconds of processor time since the machine's start: all there is, of it idle, of it this process and its children.
Sample = tuple[float, float, float]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes busy, with one thread each, inside the context."""
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    started = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def fair_share(threads: int, load: int) -> float:
    """The share of its quiet speed that a process with so many threads is due beside ``load`` busy ones."""
    cores = len(os.sched_getaffinity(0))
    return min(1.0, cores / (min(threads, cores) + load))


def sample(stat: Path = STAT) -> Sample | None:
    """Read the processor time used until now; None where the system does not tell."""
    if (spent := process_module.processor_time(stat)) is None:
        return None
    return spent.total, spent.idle, time.process_time() + _of_children()


def _of_children() -> float:
    """Seconds of processor time of this process's children, also of those that have ended: llama.cpp runs in one."""
    ended, running = os.times(), 0
    for stat in PROCESSES.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == os.getpid():
            running += int(fields[11]) + int(fields[12])
    return ended.children_user + ended.children_system + running / os.sysconf("SC_CLK_TCK")


def share(before: Sample | None, after: Sample | None) -> list[float]:
    """The share of all processors that other processes took between two samples; nothing where it is not known."""
    if before is None or after is None or after[0] <= before[0]:
        return []
    total, idle, own = (late - early for early, late in zip(before, after, strict=True))
    return [min(max((total - idle - own) / total, 0.0), 1.0)]
