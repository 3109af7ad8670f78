"""The GPU for ``kvchat doctor``: driver, GPUs, the device in the settings, pinned memory, how steps are computed.

``torch`` is the module, None where it cannot be imported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from kvchat import nvml, units
from kvchat.doctor.check import Check, guarded
from kvchat.doctor.libraries import sees_gpu
from kvchat.nvml import GpuInfo, PcieLink
from kvchat.units import MISSING

TRIAL_BYTES = 256 * 2**20
FIRST_BFLOAT16 = (8, 0)
PINNED_ADVICE = (
    "It works, but recall goes over the processor and steps are not captured. In a container: --ulimit memlock=-1 and "
    "enough memory."
)


def checks(device: str, torch: Any, has_triton: bool) -> Iterator[Check]:
    """All checks of the GPU; ``device`` is the one in the settings."""
    infos = [reader.info() for reader in nvml.all_gpus()]
    yield guarded("driver", lambda: driver(nvml.driver_version(), len(infos), torch))
    for info in infos:
        yield guarded("GPU", partial(gpu, info))
    yield guarded("device", lambda: chosen_device(device, torch))
    cuda = device != "cpu" and sees_gpu(torch)
    pinned = guarded("pinning", lambda: pinning(torch, cuda))
    yield pinned
    yield guarded("decode steps", lambda: decode_steps(cuda, has_triton, pinned.state == "ok"))


def driver(version: str | None, gpus: int, torch: Any) -> Check:
    """The driver, and whether torch can use it."""
    if version is None:
        seen = f"torch sees {torch.cuda.device_count()} GPU" if sees_gpu(torch) else "kvchat runs on the CPU"
        return Check("driver", "ok", f"no NVML; {seen}")
    found = f"{version}, {gpus} GPU"
    if torch is not None and not torch.version.cuda:
        return Check("driver", "warning", found, "This torch is built without CUDA: install a CUDA build of it.")
    if torch is not None and not torch.cuda.is_available():
        advice = "torch does not see the GPU: the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides it."
        return Check("driver", "warning", found, advice)
    return Check("driver", "ok", found)


def gpu(info: GpuInfo) -> Check:
    """One GPU: memory, compute capability, PCIe link now and at best."""
    capability = info.compute_capability
    version = "{}.{}".format(*capability) if capability else MISSING
    found = (
        f"{info.name or MISSING}, {_memory(info)}, compute capability {version}, "
        f"PCIe {_link(info.link)}, at best {_link(info.link_max)}"
    )
    if capability and capability < FIRST_BFLOAT16:
        return Check("GPU", "warning", found, "It has no bfloat16: give --dtype float16.")
    if info.link.width and info.link_max.width and info.link.width < info.link_max.width:
        advice = "The link has fewer lanes than it could: another slot or a riser may share them. Recall is as slow."
        return Check("GPU", "warning", found, advice)
    return Check("GPU", "ok", found)


def chosen_device(device: str, torch: Any) -> Check:
    """Check that torch has the device in the settings."""
    there = sees_gpu(torch)
    if device.startswith("cuda") and not there:
        advice = 'Set [model] device = "auto", or make torch see the GPU.'
        return Check("device", "problem", f"{device} is set, torch sees no GPU", advice)
    number = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and number >= (gpus := torch.cuda.device_count()):
        advice = f'Set [model] device = "cuda:{gpus - 1}" or lower; CUDA counts from 0.'
        return Check("device", "problem", f"{device} is set, torch sees {units.count(gpus)} GPU", advice)
    used = "cpu" if device == "cpu" or not there else "cuda" if device == "auto" else device
    return Check("device", "ok", f"{device} is set, {used} is used" if device == "auto" else used)


def pinning(torch: Any, cuda: bool, registrar: Any = None) -> Check:
    """Pin ``TRIAL_BYTES`` of host memory as the host pool does, and release them."""
    if not cuda:
        return Check("pinning", "ok", "nothing is pinned on a CPU")
    from kvchat.kv.memory import available, pinned  # they import torch

    if available.usable(available.host_free()) < TRIAL_BYTES:
        advice = f"Less than {units.size(TRIAL_BYTES)} of host memory is free, too little to try it."
        return Check("pinning", "warning", MISSING, advice)
    region = pinned.PinnedRegion(TRIAL_BYTES)
    segment = region.commit(TRIAL_BYTES)
    registrar = registrar or pinned.CudaRegistrar(torch.device("cuda", torch.cuda.current_device()))
    began = time.perf_counter()
    try:
        region.register(registrar, segment)
    except RuntimeError as error:
        return Check("pinning", "warning", str(error), PINNED_ADVICE)
    per_gib = (time.perf_counter() - began) / (TRIAL_BYTES / 2**30)
    region.unregister()
    return Check("pinning", "ok", f"{units.size(TRIAL_BYTES)} tried, {units.figure(per_gib, 's/GiB', 2)}")


def decode_steps(cuda: bool, has_triton: bool, pinned: bool) -> Check:
    """The way a decoded token would be computed, with the reason."""
    name = "decode steps"
    if not cuda:
        return Check(name, "ok", "CPU: stock torch operations")
    if not pinned:
        return Check(name, "warning", "stock torch operations, no CUDA graph", "Host memory is not pinned: see above.")
    if not has_triton:
        return Check(name, "warning", "CUDA graph with stock torch operations", "Triton is not there: see above.")
    return Check(name, "ok", "CUDA graph with Triton kernels (stock torch operations for float32 models)")


def _memory(info: GpuInfo) -> str:
    if info.memory is None or info.memory_used is None:
        return f"memory {MISSING}"
    return f"{units.size(info.memory - info.memory_used)} of {units.size(info.memory)} free"


def _link(link: PcieLink) -> str:
    """``gen 4 x16``"""
    if link.generation is None or link.width is None:
        return MISSING
    return f"gen {link.generation} x{link.width}"
