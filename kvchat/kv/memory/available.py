"""How much memory is free, within the container's limits, and whether a mode fits.

Linux overcommits memory: an allocation succeeds, but the process is killed when it touches it. So free memory is
checked before each large allocation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvchat.errors import DoesNotFitError
from kvchat.process import CGROUPS, system_text
from kvchat.units import size

if TYPE_CHECKING:
    import torch


PROC = Path("/proc")
# Maximum reserve for the framework, kernels' workspaces and the screen; otherwise 6 % of the free memory.
MARGIN = 768 * 2**20
UNLIMITED = 2**60  # cgroup v1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True)
class Limit:
    """A container's memory limit and its current usage without reclaimable file cache, in bytes."""

    limit: int
    used: int


def usable(free: int) -> int:
    """Return the part of ``free`` bytes that may be used; the rest is a reserve."""
    return free - min(MARGIN, free * 6 // 100)


def host_free(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes of host memory that are still free, within the container's limit if there is one."""
    free = _available(proc)
    bound = container_limit(proc, cgroups)
    return free if bound is None else max(0, min(free, bound.limit - bound.used))


def container_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> Limit | None:
    """Return the tightest memory limit on this process (cgroup v2 or v1); None if there is none or it is unreadable."""
    limits = [limit for limit in map(_limit, _groups(proc, cgroups)) if limit]
    return min(limits, key=lambda limit: limit.limit - limit.used, default=None)


def _available(proc: Path) -> int:
    """Return the bytes that the system can provide without swapping: free pages and file cache."""
    fields = _fields(proc / "meminfo")
    if "MemAvailable" in fields:
        return fields["MemAvailable"] * 1024
    if sys.platform != "linux":
        import psutil

        return int(psutil.virtual_memory().available)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of the process's memory cgroup and of its parents; each of them can set a limit."""
    for line in system_text(proc / "self" / "cgroup").splitlines():
        _, _, entry = line.partition(":")
        controllers, colon, path = entry.partition(":")
        if not colon or controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        # In a container the path may be the host's, and only the root is visible.
        inner = Path(path.lstrip("/"))
        yield from (root / group for group in (inner, *inner.parents))


def _limit(group: Path) -> Limit | None:
    for limit_file, used_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = system_text(group / limit_file), system_text(group / used_file)
        if limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED:
            return Limit(int(limit), max(0, int(used) - _fields(group / "memory.stat").get(cache, 0)))
    return None


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers of a file with ``name number`` lines; empty if it cannot be read."""
    pairs = (line.replace(":", " ").split()[:2] for line in system_text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


class SwitchCost(NamedTuple):
    """The cost of entering a mode: bytes moved to the device (at most), the mode's device bytes, and the time.

    ``seconds`` follows from the rate of earlier fills or of the link; None if neither was measured.
    """

    moved_bytes: int
    device_bytes: int
    seconds: float | None


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        import torch  # not imported by callers that only ask for host memory

        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_free()


def check_fits(mode: str, needed: int, tokens: int, device: torch.device, released: int) -> None:
    """Refuse a ``mode`` that needs more bytes than are free once the old mode has ``released`` its own."""
    left = usable(free_bytes(device) + released)
    if needed > left:
        raise DoesNotFitError(
            f"The {mode} mode does not fit.",
            f"Its K/V of {tokens:,} tokens take {size(needed, 2)} on {device}, and {size(left, 2)} are free.",
            "Use a mode with a budget (streaming, speculative), a smaller budget or a shorter conversation.",
        )
