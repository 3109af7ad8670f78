"""The machine kvchat runs on, for ``kvchat doctor``: memory, container, NUMA, processors.

Imports no torch. Every reader takes the trees it reads; a reading that is not to be had is ``n/a``.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from kvchat.kv.memory import available

SYS = Path("/sys")
MISSING = "n/a"
LITTLE_MEMORY = 2 * 2**30  # a small model's weights and some thousand tokens


@dataclass(frozen=True)
class Check:
    """What was found, whether it is fine, and what to do where it is not; a ``problem`` keeps kvchat from running."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def guarded(name: str, read: Callable[[], Check]) -> Check:
    """A check; one that cannot be made is no problem of its own."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # whatever a library or a driver raises, the report goes on
        lines = str(error).splitlines() or [""]
        return Check(name, "warning", MISSING, f"It could not be read: {type(error).__name__}: {lines[0]}")


def checks(gpu_buses: tuple[str, ...], threads: int | None) -> Iterator[Check]:
    """All of the machine; ``gpu_buses`` are the GPUs' PCI addresses, ``threads`` those that torch computes with."""
    yield guarded("processors", lambda: processors(threads))
    yield guarded("host memory", host_memory)
    yield guarded("container", container)
    yield guarded("memory lock", memory_lock)
    yield guarded("WSL", wsl)
    for bus in gpu_buses or ("",):
        yield guarded("NUMA", partial(numa, bus))


def processors(threads: int | None, cgroups: Path = available.CGROUPS) -> Check:
    """Processors this process may use, the container's share of them, and threads."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    share = _cpu_share(cgroups)
    found = f"{usable} of {present}, torch computes with {MISSING if threads is None else threads} threads"
    if share is not None and share < usable:
        found += f", the container gives the time of {share:.1f}"
        if threads is not None and threads > share + 1:
            return Check("processors", "warning", found, f"Threads wait for each other: OMP_NUM_THREADS={int(share)}")
    return Check("processors", "ok", found)


def host_memory(proc: Path = available.PROC, cgroups: Path = available.CGROUPS) -> Check:
    """What can be taken: the pool of all K/V lies in it."""
    free = available.host_free(proc, cgroups)
    found = f"{gib(free)} can be had"
    if free < LITTLE_MEMORY:
        return Check(
            "host memory", "warning", found, "All K/V is kept here: close programs or keep conversations short."
        )
    return Check("host memory", "ok", found)


def container(proc: Path = available.PROC, cgroups: Path = available.CGROUPS) -> Check:
    """The memory limit over this process, which pinned memory counts against too."""
    limit = available.container_limit(proc, cgroups)
    if limit is None:
        return Check("container", "ok", "no memory limit")
    found = f"{gib(limit.used)} of {gib(limit.limit)} used"
    if limit.limit - limit.used < LITTLE_MEMORY:
        return Check("container", "warning", found, "The conversation's K/V counts against it: give it more memory.")
    return Check("container", "ok", found)


def memory_lock(limit: int | None = None) -> Check:
    """``RLIMIT_MEMLOCK``. Most drivers pin without it; the trial of pinning tells."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    return Check("memory lock", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024:,} KiB")


def wsl(proc: Path = available.PROC) -> Check:
    """Windows' Linux: its driver pins less."""
    release = _text(proc / "sys" / "kernel" / "osrelease")
    if "microsoft" not in release.lower():
        return Check("WSL", "ok", "no" if release else MISSING)
    advice = "Windows limits pinned memory, to about half of the machine's; beyond that recall is slow."
    return Check("WSL", "warning", release, advice)


def numa(bus: str, sys: Path = SYS, proc: Path = available.PROC, allowed: frozenset[int] | None = None) -> Check:
    """Where the GPU at PCI address ``bus`` ("" for none) hangs, and whether this process is bound away from it.

    ``allowed`` are the processors it may use.
    """
    folder = sys / "devices" / "system" / "node"
    nodes = sorted(int(node.name[4:]) for node in folder.glob("node[0-9]*"))
    if not nodes:
        return Check("NUMA", "ok", MISSING)
    near = _gpu_node(bus, sys)
    found = f"{len(nodes)} node{'s' * (len(nodes) > 1)}"
    if bus:
        found += f", {bus} at {MISSING if near is None else f'node {near}'}"
    if len(nodes) == 1 or near is None:
        return Check("NUMA", "ok", found)
    advice = f"K/V would cross between sockets: numactl --cpunodebind={near} --membind={near} kvchat"
    cpus = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    if not cpus & _numbers(_text(folder / f"node{near}" / "cpulist")):
        return Check("NUMA", "warning", f"{found}, this process runs on others' processors only", advice)
    if near not in _memory_nodes(proc, frozenset(nodes)):
        return Check("NUMA", "warning", f"{found}, this process may not take its memory", advice)
    return Check("NUMA", "ok", found)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"


def _gpu_node(bus: str, sys: Path) -> int | None:
    """The node of a PCI device, None where it has none or does not tell."""
    # NVML writes the domain with eight digits, the kernel with four.
    domain, _, rest = bus.lower().partition(":")
    text = _text(sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    return int(text) if text.isdigit() else None


def _memory_nodes(proc: Path, nodes: frozenset[int]) -> frozenset[int]:
    """Nodes this process' memory may come from: its cpuset, narrowed by a policy such as numactl's."""
    match = re.search(r"^Mems_allowed_list:\s*(\S+)", _text(proc / "self" / "status"), re.MULTILINE)
    allowed = _numbers(match[1]) if match else nodes
    policy = re.match(r"\S+ (?:bind|interleave)[^:]*:(\S+)", _text(proc / "self" / "numa_maps"))
    return allowed & _numbers(policy[1]) if policy else allowed


def _cpu_share(cgroups: Path) -> float | None:
    """Processors' worth of time the container gives (cgroup v2 or v1), None where it does not limit."""
    quota, _, period = _text(cgroups / "cpu.max").partition(" ")
    if not period:
        quota, period = (_text(cgroups / "cpu" / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _numbers(text: str) -> frozenset[int]:
    """``0-3,8`` -> 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
