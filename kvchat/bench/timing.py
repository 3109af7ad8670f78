"""Times of decoded tokens, and their circumstances: hardware, versions, peak memory, and load by other processes.

A variant is anything that decodes. The load by other programs varies, so a time means nothing without that load.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

import kvchat
from kvchat import nvml, paths
from kvchat.process import PROCESSES, STAT, processor_time, usable_processors

# Uncounted first steps, which compile and allocate; on a GPU each kind of step (sync mode has five) runs once before it
# is captured.
WARM_UP = {"cpu": 3, "cuda": 12}
OWN = Path("/proc/self")
FORGET_PEAK = "5"
# Ends by itself after its parent ends, even if the parent was killed.
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
# Seconds of CPU time since boot: of all processors, idle, and of this process with its children.
Sample = tuple[float, float, float]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per token: wall time of the median step and of the mean one, and CPU time of this process.

    CPU time adds up all threads and hardly depends on other programs; None if another process decodes. ``chat_ms`` is a
    median step that also samples its token and reads it from the device; None if not measured.
    """

    ms: float
    wall_ms: float
    processor_ms: float | None = None
    chat_ms: float | None = None


class Variant(Protocol):
    """One side of a comparison: decodes the same tokens after the same context as all others."""

    name: str

    @property
    def figures(self) -> dict[str, Any]:
        """Further columns of its row, valid after a measurement."""
        ...

    def measure(self, tokens: Sequence[int]) -> Timing:
        """Decode ``tokens`` after the context; the first ``warm_up`` do not count."""
        ...

    def close(self) -> None: ...


def warm_up(device: torch.device) -> int:
    """Return the number of steps before those that count."""
    return WARM_UP[device.type]


def time_steps(
    step: Callable[[int], object], tokens: Sequence[int], device: torch.device, first: int | None = None
) -> Timing:
    """Time ``step`` for each token, leaving out those before ``first`` (None: the ``warm_up``).

    Each step waits for the device, because in a chat the next token is sampled from its logits.
    """
    first, times, spent = warm_up(device) if first is None else first, [], 0.0
    for number, token in enumerate(tokens):
        if number == first:
            spent = time.process_time()
        began = time.perf_counter()
        step(token)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= first:
            times.append(1000 * (time.perf_counter() - began))
    spent = time.process_time() - spent
    return Timing(statistics.median(times), statistics.fmean(times), 1000 * spent / len(times))


def fingerprint(device: torch.device) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": nvml.driver_version() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "triton": version("triton") if find_spec("triton") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "kvchat": paths.with_commit(kvchat.__version__),
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def forget_peak(process: Path = OWN) -> bool:
    """Reset the peak to the memory in use now; False if the system does not allow it."""
    try:
        (process / "clear_refs").write_text(FORGET_PEAK)
    except OSError:
        return False
    return True


def read_peak(process: Path = OWN) -> int | None:
    """Return the peak bytes in RAM; None if the system does not report them."""
    try:
        lines = (process / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


@contextmanager
def keep_busy(processes: int) -> Iterator[None]:
    """Keep this many single-threaded processes busy inside the context."""
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
    """Return the fair share of its speed that a process with ``threads`` threads keeps next to ``load`` others."""
    cores = len(usable_processors())
    return min(1.0, cores / (min(threads, cores) + load))


def sample_processors(stat: Path = STAT) -> Sample | None:
    """Read the CPU time used so far; None if the system does not report it."""
    if (spent := processor_time(stat)) is None:
        return None
    return spent.total, spent.idle, time.process_time() + _of_children()


def _of_children() -> float:
    """Return seconds of CPU time of this process's children, running and ended; llama.cpp runs in one."""
    ended, running = os.times(), 0
    for stat in PROCESSES.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        if int(fields[1]) == os.getpid():
            running += int(fields[11]) + int(fields[12])
    return ended.children_user + ended.children_system + running / os.sysconf("SC_CLK_TCK")


def share_of_others(before: Sample | None, after: Sample | None) -> list[float]:
    """Return the share of all processors that other processes used between two samples, in a list; [] if unknown."""
    if before is None or after is None or after[0] <= before[0]:
        return []
    total, idle, own = (late - early for early, late in zip(before, after, strict=True))
    return [min(max((total - idle - own) / total, 0.0), 1.0)]
