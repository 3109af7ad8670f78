"""Checks of ``kvchat doctor``: processors, RAM, container, NUMA and terminal; driver, GPUs and pinned memory."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvchat import nvml
from kvchat.doctor.installation import Check, guarded, sees_gpu
from kvchat.kv.memory import available
from kvchat.nvml import GpuInfo, PcieLink
from kvchat.process import CGROUPS, processor_share, system_text, usable_processors
from kvchat.units import MISSING, count, figure, size

SYS = Path("/sys")
SMALLEST = (40, 12)  # columns and lines the chat needs
LITTLE_MEMORY = 2 * 2**30  # a small model's weights and a few thousand tokens
TRIAL_BYTES = 256 * 2**20
PINNED_ADVICE = (
    "It works, but recall goes through the CPU, and steps run without a CUDA graph. In a container: --ulimit memlock=-1"
    " and enough memory."
)


def checks(threads: int | None) -> Iterator[Check]:
    """Run all checks of the host; ``threads`` is the number that torch uses."""
    yield guarded("processors", lambda: processors(threads))
    yield guarded("RAM", host_memory)
    yield guarded("container", container)
    yield guarded("WSL", wsl)
    for reader in nvml.all_gpus():
        yield guarded("NUMA", partial(numa, reader.info().bus_id or ""))
    yield guarded("terminal", terminal)


def processors(threads: int | None, cgroups: Path = CGROUPS) -> Check:
    """Check the processors that this process may use, the container's limit, and torch's threads."""
    usable, present = len(usable_processors()), os.cpu_count() or 0
    share = processor_share(cgroups)
    found = f"{usable} of {present}, torch uses {count(threads, 'thread')}"
    if share is not None and share < usable:
        found += f", the container allows {share:.1f}"
        if threads is not None and threads > share + 1:
            return Check("processors", "warning", found, f"Too many threads: set OMP_NUM_THREADS={int(share)}")
    return Check("processors", "ok", found)


def host_memory(proc: Path = available.PROC, cgroups: Path = CGROUPS) -> Check:
    """Check free RAM, which holds the host pool."""
    free = available.host_free(proc, cgroups)
    found = f"{size(free)} free"
    if free < LITTLE_MEMORY:
        return Check("RAM", "warning", found, "RAM holds all K/V: close programs or keep conversations short.")
    return Check("RAM", "ok", found)


def container(proc: Path = available.PROC, cgroups: Path = CGROUPS) -> Check:
    limit = available.container_limit(proc, cgroups)
    if limit is None:
        return Check("container", "ok", "no memory limit")
    found = f"{size(limit.used)} of {size(limit.limit)} used"
    if limit.limit - limit.used < LITTLE_MEMORY:
        return Check("container", "warning", found, "The conversation's K/V count against it: give it more memory.")
    return Check("container", "ok", found)


def wsl(proc: Path = available.PROC) -> Check:
    """Detect the Windows Subsystem for Linux, whose driver can pin less memory."""
    release = system_text(proc / "sys" / "kernel" / "osrelease")
    if "microsoft" not in release.lower():
        return Check("WSL", "ok", "no")
    advice = "Windows limits pinned memory, to about half of the machine's; beyond that, recall is slow."
    return Check("WSL", "warning", release, advice)


def numa(bus: str, sysfs: Path = SYS) -> Check:
    """Check whether this process runs on processors of the NUMA node of the GPU at PCI address ``bus``."""
    # NVML writes the domain with eight digits, the kernel with four.
    domain, _, rest = bus.lower().partition(":")
    near = system_text(sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    if not near.isdigit():
        return Check("NUMA", "ok", f"{bus} at an unknown node")
    found = f"{bus} at node {near}"
    cpus = system_text(sysfs / "devices" / "system" / "node" / f"node{near}" / "cpulist")
    if cpus and _numbers(cpus).isdisjoint(usable_processors()):
        advice = f"K/V would cross sockets; run: numactl --cpunodebind={near} --membind={near} kvchat"
        return Check("NUMA", "warning", f"{found}, but this process runs only on other nodes' processors", advice)
    return Check("NUMA", "ok", found)


def terminal() -> Check:
    """Check colors, size and characters of the terminal."""
    if not sys.stdout.isatty():
        return Check("terminal", "ok", "none: the output goes to a file or a pipe")
    columns, lines = shutil.get_terminal_size()
    term, colors = os.environ.get("TERM", ""), os.environ.get("COLORTERM", "")
    found = f"TERM={term or MISSING} COLORTERM={colors or MISSING}, {columns}x{lines}"
    if term in ("", "dumb"):
        return Check("terminal", "warning", found, "The chat needs cursor control; kvchat ask works here.")
    if columns < SMALLEST[0] or lines < SMALLEST[1]:
        return Check("terminal", "warning", found, "The chat needs {}x{}: enlarge the window.".format(*SMALLEST))
    if colors not in ("truecolor", "24bit") and "direct" not in term:
        return Check("terminal", "ok", f"{found}; colors are approximated")
    return Check("terminal", "ok", found)


def _numbers(text: str) -> frozenset[int]:
    """Parse a list of ranges: ``0-3,8`` -> 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def gpu_checks(device: str, torch: Any, has_triton: bool) -> Iterator[Check]:
    """Run all checks of the GPUs; ``device`` is the one in the settings."""
    infos = [reader.info() for reader in nvml.all_gpus()]
    yield guarded("driver", lambda: driver(nvml.driver_version(), len(infos), torch))
    for info in infos:
        yield guarded("GPU", partial(gpu, info))
    yield guarded("device", lambda: chosen_device(device, torch))
    if sees_gpu(torch) and torch.cuda.device_count() > 1:
        yield guarded("several GPUs", lambda: several(torch))
    cuda = device != "cpu" and sees_gpu(torch)
    pinned = guarded("pinning", lambda: pinning(torch, cuda))
    yield pinned
    yield guarded("decode steps", lambda: decode_steps(cuda, has_triton, pinned.state == "ok"))


def driver(version: str | None, gpus: int, torch: Any) -> Check:
    if version is None:
        seen = f"torch sees {count(torch.cuda.device_count(), 'GPU')}" if sees_gpu(torch) else "kvchat runs on the CPU"
        return Check("driver", "ok", f"no NVIDIA driver found; {seen}")
    found = f"{version}, {count(gpus, 'GPU')}"
    if torch is not None and not torch.version.cuda:
        return Check("driver", "warning", found, "This torch was built without CUDA: install a CUDA build.")
    if torch is not None and not torch.cuda.is_available():
        advice = "torch does not see the GPU: the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides it."
        return Check("driver", "warning", found, advice)
    return Check("driver", "ok", found)


def gpu(info: GpuInfo) -> Check:
    """Describe one GPU: memory, compute capability, current and best PCIe link."""
    capability = info.compute_capability
    version = "{}.{}".format(*capability) if capability else MISSING
    if capability and capability < (8, 0):
        version += " (no bfloat16: models run in float16)"
    memory = f"memory {MISSING}"
    if info.memory is not None and info.memory_used is not None:
        memory = f"{size(info.memory - info.memory_used)} of {size(info.memory)} free"
    found = (
        f"{info.name or MISSING}, {memory}, compute capability {version}, "
        f"PCIe {_link(info.link)}, at best {_link(info.link_max)}"
    )
    if info.link.width and info.link_max.width and info.link.width < info.link_max.width:
        advice = "The link uses fewer lanes than it could, which slows recall: another slot or a riser may share them."
        return Check("GPU", "warning", found, advice)
    return Check("GPU", "ok", found)


def chosen_device(device: str, torch: Any) -> Check:
    """Check that torch has the device in the settings."""
    has_gpu = sees_gpu(torch)
    if device.startswith("cuda") and not has_gpu:
        advice = 'Set [model] device = "auto", or make the GPU visible to torch.'
        return Check("device", "problem", f"{device} is set, but torch sees no GPU", advice)
    number = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and number >= (gpus := torch.cuda.device_count()):
        advice = f'Set [model] device = "cuda:{gpus - 1}" or lower; CUDA counts from 0.'
        return Check("device", "problem", f"{device} is set, but torch sees {count(gpus, 'GPU')}", advice)
    used = "cpu" if device == "cpu" or not has_gpu else "cuda" if device == "auto" else device
    return Check("device", "ok", f"{used}, chosen by auto" if device == "auto" else used)


def several(torch: Any) -> Check:
    """Report how many GPUs a model can be split over, and how the first exchanges data with the others."""
    count = torch.cuda.device_count()
    direct = {f"cuda:{n}": bool(torch.cuda.can_device_access_peer(0, n)) for n in range(1, count)}
    routes = [f"{'directly' if direct[each] else 'through RAM'} with {each}" for each in direct]
    found = f"--gpus {count} splits a model too large for one; cuda:0 exchanges data {', '.join(routes)}"
    return Check("several GPUs", "ok", found)


def pinning(torch: Any, cuda: bool, registrar: Any = None) -> Check:
    """Pin ``TRIAL_BYTES`` of RAM as the host pool does, and release them."""
    if not cuda:
        return Check("pinning", "ok", "not needed on a CPU")
    from kvchat.kv.memory import available, pinned  # imports torch

    if available.usable(available.host_free()) < TRIAL_BYTES:
        advice = f"Less than {size(TRIAL_BYTES)} of RAM is free, too little to test pinning."
        return Check("pinning", "warning", MISSING, advice)
    region = pinned.PinnedRegion(TRIAL_BYTES)
    region.commit(TRIAL_BYTES)
    registrar = registrar or pinned.CudaRegistrar(torch.device("cuda", torch.cuda.current_device()))
    began = time.perf_counter()
    try:
        region.pin(registrar)
    except RuntimeError as error:
        return Check("pinning", "warning", str(error), PINNED_ADVICE)
    per_gib = (time.perf_counter() - began) / (TRIAL_BYTES / 2**30)
    region.unpin()
    return Check("pinning", "ok", f"{size(TRIAL_BYTES)} tried, {figure(per_gib, 's/GiB', 2)}")


def decode_steps(cuda: bool, has_triton: bool, pinned: bool) -> Check:
    """Report how tokens are decoded, and what prevents the fastest way."""
    name = "decode steps"
    if not cuda:
        return Check(name, "ok", "on the CPU")
    if not pinned:
        return Check(name, "warning", "stock torch operations, no CUDA graph", "RAM cannot be pinned: see above.")
    if not has_triton:
        return Check(name, "warning", "CUDA graph with stock torch operations", "Triton is missing: see above.")
    return Check(name, "ok", "CUDA graph with Triton kernels (stock torch operations for float32 models)")


def _link(link: PcieLink) -> str:
    """Format a link: ``gen 4 x16``."""
    if link.generation is None or link.width is None:
        return MISSING
    return f"gen {link.generation} x{link.width}"
