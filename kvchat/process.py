"""This process: torch's threads, set before torch is imported, the processors' time, its memory and its parent."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
PROCESSORS = Path("/sys/devices/system/cpu")
# Both are OpenMP's own: one that is set is somebody's choice.
WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# Looks of a waiting thread before it sleeps, some 30 us: about what waking it costs, so that waiting costs at most
# twice what it would if its length were known. Without any, a token of the bundled model takes twice as long.
SPINS = 3000
NUM_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PROCESSES = Path("/proc")
STAT = PROCESSES / "stat"
LATE = 200  # collections of the middle generation before a full one; Python's rule: 10
PR_SET_PDEATHSIG = 1  # prctl(2)


def spin_briefly() -> None:
    """Let OpenMP's threads sleep after a short wait, unless the environment says how they shall wait.

    By default they spin for milliseconds, which is only fast while every thread has a core of its own: beside any other
    load they spin for threads that are not running, and decoding becomes many times slower. OpenMP reads the
    environment once, when torch is imported. GNU's takes the count, others the policy: to sleep at once.
    """
    if WAIT_POLICY not in os.environ and SPIN_COUNT not in os.environ:
        os.environ.update({WAIT_POLICY: "PASSIVE", SPIN_COUNT: str(SPINS)})


def postpone_full_collections() -> None:
    """Let the garbage collector look through everything late: a third of the time that imports take went into that."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, LATE)


def end(code: object = 0) -> None:
    """End with ``code`` at once: Python frees what torch and transformers imported for a second first."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # which Python tells of at its own end
        return
    if code is None or isinstance(code, int):
        os._exit(code or 0)


def python(*arguments: str) -> tuple[str, ...]:
    """The command of another Python with these arguments; it imports nothing of the folder that it is started in.

    Else a ``random.py`` there would be run in place of Python's own.
    """
    return sys.executable, "-P", *arguments


def as_the_user_left_it() -> dict[str, str]:
    """Return the environment without what ``spin_briefly`` set, for a process that is not kvchat's own code."""
    ours = os.environ.get(SPIN_COUNT) == str(SPINS)
    return {name: value for name, value in os.environ.items() if not (ours and name in (WAIT_POLICY, SPIN_COUNT))}


def use_physical_cores(cgroups: Path = CGROUPS, processors: Path = PROCESSORS) -> None:
    """Let torch compute with a thread for each physical core, and with no more than the container grants processors.

    Two threads of one core share its arithmetic, and the kernel stops all threads once the container's time is used up.
    Nothing is set where the environment says how many, or where every processor may be used.
    """
    share, cores = processor_share(cgroups), physical_cores(processors)
    most = [int(bound) for bound in (share, cores) if bound is not None]
    chosen = any(name in os.environ for name in NUM_THREADS)
    if not chosen and most and min(most) < len(usable_processors()):
        os.environ[NUM_THREADS[0]] = str(max(1, min(most)))


def usable_processors() -> Collection[int]:
    """The numbers of the processors that this process may use; all of them where the system does not tell."""
    if sys.platform != "linux":
        return range(os.cpu_count() or 1)
    return os.sched_getaffinity(0)


def physical_cores(processors: Path = PROCESSORS) -> int | None:
    """The physical cores among the processors this process may use; None where the system does not tell."""
    if not processors.is_dir():
        return None
    usable = (processors / f"cpu{number}" for number in usable_processors())
    # Of one core all processors name the same ones; numbers of cores are unique within a package or a die only.
    siblings = {system_text(processor / "topology" / "thread_siblings_list") for processor in usable}
    return None if "" in siblings else len(siblings)


def processor_share(cgroups: Path = CGROUPS) -> float | None:
    """The processor time the container grants, in processors (cgroup v2 or v1); None without a limit."""
    quota, _, period = system_text(cgroups / "cpu.max").partition(" ")
    if not period:
        quota, period = (system_text(cgroups / "cpu" / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def system_text(file: Path) -> str:
    """What the system tells in a file of /proc or /sys, stripped; "" where it does not."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


class Spent(NamedTuple):
    """Seconds since the machine's start, of all ``processors`` together: all there were, and those without work."""

    total: float
    idle: float
    processors: int


def processor_time(stat: Path = STAT) -> Spent | None:
    """Read what was spent until now; None where the system does not tell."""
    try:
        told = stat.read_text()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in usable_processors()}
    lines = [fields for fields in map(str.split, told.splitlines()) if fields[:1] and fields[0] in usable]
    if not lines:
        return None
    # User, nice, system, idle, waiting for a disk, interrupts, soft ones, stolen; a guest's time is part of the first.
    ticks = [[int(field) for field in fields[1:9]] for fields in lines]
    second = os.sysconf("SC_CLK_TCK")
    return Spent(sum(map(sum, ticks)) / second, sum(each[3] + each[4] for each in ticks) / second, len(lines))


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process, even a stopped one, as soon as its parent is gone; end if it is gone already.

    ``parent`` is its process id: whoever is orphaned before this call hears of no death. Only Linux can do that;
    elsewhere a process ends by the end of its stdin, which needs it to run. The parent is the thread that started the
    process.
    """
    if sys.platform == "linux":
        import ctypes  # a command that starts no engine needs none of it

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent not in (None, os.getppid()):
            sys.exit()


def claim_stdio() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for the protocol alone: what a library prints goes to stderr, what it asks for is empty."""
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return commands, events


def resident_bytes() -> int | None:
    """Bytes in RAM; None where the system does not tell."""
    if sys.platform != "linux":
        import psutil

        return int(psutil.Process().memory_info().rss)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
