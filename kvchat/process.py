"""The current process: torch's threads (set before torch is imported), CPU time, memory, parent and exit."""

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
WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # OpenMP's; if the user sets one, neither is changed
# Spins of a waiting thread before it sleeps, about 30 us. Waking it costs as much, so a wait costs at most twice the
# optimum. Without spinning, a token of the bundled model takes twice as long.
SPINS = 3000
NUM_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PROCESSES = Path("/proc")
STAT = PROCESSES / "stat"
LATE = 200  # collections of the middle generation before a full one; Python's default is 10
PR_SET_PDEATHSIG = 1  # prctl(2)


def spin_briefly() -> None:
    """Let OpenMP's threads sleep after a short wait, unless the environment sets how they wait.

    By default they spin for milliseconds, which is fast only if each thread has a core to itself. Under any other load
    they spin while waiting for threads that are not running, and decoding becomes many times slower. OpenMP reads the
    environment once, when torch is imported. GNU's uses the count, others the policy, which makes them sleep at once.
    """
    if WAIT_POLICY not in os.environ and SPIN_COUNT not in os.environ:
        os.environ.update({WAIT_POLICY: "PASSIVE", SPIN_COUNT: str(SPINS)})


def postpone_full_collections() -> None:
    """Make full garbage collections rare, because they took a third of the time of imports."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, LATE)


def end(code: object = 0) -> None:
    """Exit with ``code`` without Python's cleanup, which takes a second to free torch and transformers."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # Python reports it on its own exit
        return
    if code is None or isinstance(code, int):
        os._exit(code or 0)


def python(*arguments: str) -> tuple[str, ...]:
    """Return the command that runs Python with these arguments.

    It imports no module from its working directory, so that a ``random.py`` there does not replace Python's own.
    """
    return sys.executable, "-P", *arguments


def as_the_user_left_it() -> dict[str, str]:
    """Return the environment without the variables of ``spin_briefly``, for programs other than kvchat."""
    ours = os.environ.get(SPIN_COUNT) == str(SPINS)
    return {name: value for name, value in os.environ.items() if not (ours and name in (WAIT_POLICY, SPIN_COUNT))}


def use_physical_cores(cgroups: Path = CGROUPS, processors: Path = PROCESSORS) -> None:
    """Limit torch to one thread per physical core, and to the number of CPUs that the container grants.

    Two threads on one core share its arithmetic units, and the kernel stops all threads when the container's CPU time
    is used up. Nothing is set if the environment sets the number, or if every CPU may be used.
    """
    share, cores = processor_share(cgroups), physical_cores(processors)
    most = [int(bound) for bound in (share, cores) if bound is not None]
    chosen = any(name in os.environ for name in NUM_THREADS)
    if not chosen and most and min(most) < len(usable_processors()):
        os.environ[NUM_THREADS[0]] = str(max(1, min(most)))


def usable_processors() -> Collection[int]:
    """Return the numbers of the logical CPUs that this process may use; all of them if the system does not say."""
    if sys.platform != "linux":
        return range(os.cpu_count() or 1)
    return os.sched_getaffinity(0)


def physical_cores(processors: Path = PROCESSORS) -> int | None:
    """Return the number of physical cores that this process may use; None if unknown."""
    if not processors.is_dir():
        return None
    usable = (processors / f"cpu{number}" for number in usable_processors())
    # All CPUs of a core list the same siblings; core numbers are unique only within a package or die.
    siblings = {system_text(processor / "topology" / "thread_siblings_list") for processor in usable}
    return None if "" in siblings else len(siblings)


def processor_share(cgroups: Path = CGROUPS) -> float | None:
    """Return the container's limit of CPU time, in CPUs (cgroup v2 or v1); None without a limit."""
    quota, _, period = system_text(cgroups / "cpu.max").partition(" ")
    if not period:
        quota, period = (system_text(cgroups / "cpu" / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def system_text(file: Path) -> str:
    """Return the text of a file of /proc or /sys, stripped; "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


class Spent(NamedTuple):
    """CPU seconds since the machine's start, summed over ``processors``: in total and idle."""

    total: float
    idle: float
    processors: int


def processor_time(stat: Path = STAT) -> Spent | None:
    """Return the time of this process's usable CPUs until now; None if the system does not say."""
    usable = {f"cpu{number}" for number in usable_processors()}
    lines = [fields for line in system_text(stat).splitlines() if (fields := line.split()) and fields[0] in usable]
    if not lines:
        return None
    # User, nice, system, idle, iowait, irq, softirq, steal; the fields after them are included in user and nice time.
    ticks = [[int(field) for field in fields[1:9]] for fields in lines]
    second = os.sysconf("SC_CLK_TCK")
    return Spent(sum(map(sum, ticks)) / second, sum(each[3] + each[4] for each in ticks) / second, len(lines))


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process, even a stopped one, when its parent ends; exit if it has already ended.

    ``parent`` is the parent's process id, because a process orphaned before this call gets no signal. Only Linux
    supports this; elsewhere a process ends when its stdin closes, which requires that it is running. The kernel
    considers the thread that started the process to be its parent.
    """
    if sys.platform == "linux":
        import ctypes  # only an engine needs it

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent not in (None, os.getppid()):
            sys.exit()


def claim_stdio() -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for the protocol: libraries print to stderr instead and read an empty stdin."""
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    return commands, events


def resident_bytes() -> int | None:
    """Return this process's bytes in RAM; None if the system does not say."""
    if sys.platform != "linux":
        import psutil

        return int(psutil.Process().memory_info().rss)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
