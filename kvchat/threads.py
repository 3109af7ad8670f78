"""Set how many threads torch computes with and how they wait for each other, before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROCESSORS = Path("/sys/devices/system/cpu")
# Both are OpenMP's own: one that is set is somebody's choice.
WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# Looks of a waiting thread before it sleeps, some 30 us: about what waking it costs, so that waiting costs at most
# twice what it would if its length were known. Without any, a token of the bundled model takes twice as long.
SPINS = 3000
NUM_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def spin_briefly() -> None:
    """Let OpenMP's threads sleep after a short wait, unless the environment says how they shall wait.

    By default they spin for milliseconds, which is only fast while every thread has a core of its own: beside any other
    load they spin for threads that are not running, and decoding becomes many times slower. OpenMP reads the
    environment once, when torch is imported. GNU's takes the count, others the policy: to sleep at once.
    """
    if WAIT_POLICY not in os.environ and SPIN_COUNT not in os.environ:
        os.environ.update({WAIT_POLICY: "PASSIVE", SPIN_COUNT: str(SPINS)})


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
    if not chosen and most and min(most) < len(os.sched_getaffinity(0)):
        os.environ[NUM_THREADS[0]] = str(max(1, min(most)))


def physical_cores(processors: Path = PROCESSORS) -> int | None:
    """The physical cores among the processors this process may use; None where the system does not tell."""
    if not processors.is_dir():
        return None
    usable = (processors / f"cpu{number}" for number in os.sched_getaffinity(0))
    # Of one core all processors name the same ones; numbers of cores are unique within a package or a die only.
    siblings = {_text(processor / "topology" / "thread_siblings_list") for processor in usable}
    return None if "" in siblings else len(siblings)


def processor_share(cgroups: Path = CGROUPS) -> float | None:
    """The processor time the container grants, in processors (cgroup v2 or v1); None without a limit."""
    quota, _, period = _text(cgroups / "cpu.max").partition(" ")
    if not period:
        quota, period = (_text(cgroups / "cpu" / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
