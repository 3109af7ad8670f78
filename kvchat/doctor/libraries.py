"""What kvchat runs on, for ``kvchat doctor``: libraries, GPUs, pinning, and the way a step would take.

Imports torch inside a check only: that it cannot be imported is one of the things to find. Every check takes the
libraries it asks, so that tests stand in for them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvchat.doctor import machine
from kvchat.doctor.machine import MISSING, Check, gib, guarded

Importer = Callable[[str], Any]
TRIAL_BYTES = 256 * 2**20
OLDEST_PYTHON = (3, 11)
PINNED_ADVICE = (
    "It works, but recall goes over the processor and steps are not captured. In a container: --ulimit memlock=-1 and "
    "enough memory."
)


def checks(device: str = "auto", load: Importer = importlib.import_module) -> Iterator[Check]:
    """Everything, each when it is known; ``device`` is the one in the settings."""
    yield guarded("Python", python)
    yield guarded("torch", partial(library, "torch", load))
    yield guarded("transformers", partial(library, "transformers", load))
    torch, nvml = _imported("torch", load), _nvml(load)
    handles = _handles(nvml)
    yield guarded("driver", partial(driver, nvml, torch))
    for handle in handles:
        yield guarded("GPU", partial(gpu, nvml, handle))
    yield guarded("device", partial(chosen_device, device, torch))
    cuda = device != "cpu" and _has_cuda(torch)
    yield guarded("Triton", partial(triton, load, cuda))
    yield guarded("bitsandbytes", partial(bitsandbytes, load))
    pinned = guarded("pinning", partial(pinning, torch, cuda))
    yield pinned
    yield guarded("decode steps", lambda: path(cuda, _imported("triton", load) is not None, pinned.state == "ok"))
    yield from machine.checks(
        tuple(_bus(nvml, handle) for handle in handles), _or_none(lambda: torch.get_num_threads())
    )


# ---- libraries


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Check("Python", "problem", found, "kvchat needs Python 3.11 or newer.")
    return Check("Python", "ok", found)


def library(
    name: str,
    load: Importer = importlib.import_module,
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires,
) -> Check:
    """A library kvchat cannot do without: importable, and a version it was tested with."""
    try:
        module = load(name)
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything
        reason = f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Check(name, "problem", reason, f"pip install --force-reinstall {name}")
    build = ""
    if name == "torch":
        build = f", CUDA {module.version.cuda}" if module.version.cuda else ", without CUDA"
    wanted = _specifier(name, requires)
    # CUDA builds append a local version (2.9.0+cu128), which is no part of the comparison.
    if wanted is not None and not wanted.contains(module.__version__.partition("+")[0], prereleases=True):
        advice = f"kvchat was tested with {name}{wanted}; another may fail or be wrong."
        return Check(name, "warning", f"{module.__version__}{build}", advice)
    return Check(name, "ok", f"{module.__version__}{build}")


def triton(load: Importer, cuda: bool, find: Callable[[str], str | None] = shutil.which) -> Check:
    """The kernels' compiler, which in turn calls a C compiler."""
    try:
        version = load("triton").__version__
    except ImportError:
        if not cuda:
            return Check("Triton", "ok", "not installed; only a GPU needs it")
        return Check("Triton", "warning", "not installed", "pip install triton; without it decoding is slower.")
    if cuda and not os.environ.get("CC") and not any(map(find, ("cc", "gcc", "clang"))):
        return Check(
            "Triton", "warning", f"{version}, but no C compiler", "Install gcc or clang: kernels are built with it."
        )
    return Check("Triton", "ok", version)


def bitsandbytes(load: Importer) -> Check:
    """Weights in 4 or 8 bits."""
    try:
        return Check("bitsandbytes", "ok", str(load("bitsandbytes").__version__))
    except ImportError:
        return Check("bitsandbytes", "ok", "not installed; only weights in 4 or 8 bits need it")


# ---- the GPU


def driver(nvml: Any, torch: Any) -> Check:
    """The driver, and whether torch can use it."""
    if nvml is None:
        seen = f"torch sees {torch.cuda.device_count()} GPU" if _has_cuda(torch) else "kvchat runs on the CPU"
        return Check("driver", "ok", f"no NVML; {seen}")
    found = f"{nvml.nvmlSystemGetDriverVersion()}, {nvml.nvmlDeviceGetCount()} GPU"
    if torch is not None and not torch.version.cuda:
        return Check("driver", "warning", found, "This torch is built without CUDA: install a CUDA build of it.")
    if torch is not None and not torch.cuda.is_available():
        advice = "torch does not see the GPU: the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides it."
        return Check("driver", "warning", found, advice)
    return Check("driver", "ok", found)


def gpu(nvml: Any, handle: Any) -> Check:
    """One GPU: memory, compute capability, PCIe link now and at best (an idle GPU runs its link slower)."""
    memory = _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    capability = _or_none(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    now = _link(nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    best = _link(nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    space = f"{gib(memory.total - memory.used)} of {gib(memory.total)} free" if memory else f"memory {MISSING}"
    version = "{}.{}".format(*capability) if capability else MISSING
    found = f"{nvml.nvmlDeviceGetName(handle)}, {space}, compute capability {version}, PCIe {now}, at best {best}"
    if capability and tuple(capability) < (8, 0):
        return Check("GPU", "warning", found, "It has no bfloat16: give --dtype float16.")
    if "x" in now and "x" in best and int(now.partition("x")[2]) < int(best.partition("x")[2]):
        advice = "The link has fewer lanes than it could: another slot or a riser may share them. Recall is as slow."
        return Check("GPU", "warning", found, advice)
    return Check("GPU", "ok", found)


def chosen_device(device: str, torch: Any) -> Check:
    """Whether the settings' device is there."""
    there = _has_cuda(torch)
    if device.startswith("cuda") and not there:
        advice = 'Set [model] device = "auto", or make torch see the GPU.'
        return Check("device", "problem", f"{device} is set, torch sees no GPU", advice)
    number = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and number >= torch.cuda.device_count():
        return Check("device", "problem", f"{device} is set, there are {torch.cuda.device_count()} GPUs")
    used = "cpu" if device == "cpu" or not there else "cuda" if device == "auto" else device
    return Check("device", "ok", f"{device} is set, {used} is used" if device == "auto" else used)


def pinning(torch: Any, cuda: bool, registrar: Any = None) -> Check:
    """Pin ``TRIAL_BYTES`` of host memory as the host pool does, and give them back."""
    if not cuda:
        return Check("pinning", "ok", "nothing is pinned on a CPU")
    from kvchat.kv.memory import available, pinned

    if available.usable(available.host_free()) < TRIAL_BYTES:
        return Check("pinning", "warning", MISSING, f"There is no {gib(TRIAL_BYTES)} of host memory to try it with.")
    region = pinned.PinnedRegion(TRIAL_BYTES)
    segment = region.commit(TRIAL_BYTES)
    began = time.perf_counter()
    try:
        region.register(registrar or pinned.CudaRegistrar(torch.device("cuda", torch.cuda.current_device())), segment)
    except RuntimeError as error:
        return Check("pinning", "warning", str(error), PINNED_ADVICE)
    seconds = (time.perf_counter() - began) / (TRIAL_BYTES / 2**30)
    region.unregister()
    return Check("pinning", "ok", f"{TRIAL_BYTES // 2**20} MiB tried, {seconds:.2f} s/GiB")


def path(cuda: bool, has_triton: bool, pinned: bool) -> Check:
    """How a decoded token would be computed, and why so."""
    name = "decode steps"
    if not cuda:
        return Check(name, "ok", "CPU: stock torch operations")
    if not pinned:
        return Check(name, "warning", "stock torch operations, no CUDA graph", "Host memory is not pinned: see above.")
    if not has_triton:
        return Check(name, "warning", "CUDA graph with stock torch operations", "Triton is not there: see above.")
    return Check(name, "ok", "CUDA graph with Triton kernels (stock torch operations for float32 models)")


# ---- inside


def _specifier(name: str, requires: Callable[[str], list[str] | None]) -> Any:
    """The versions of a library that kvchat's own metadata asks for; None where there is none."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("kvchat") or ()]
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((one.specifier for one in wanted if one.name == name), None)


def _imported(name: str, load: Importer) -> Any:
    """A module, None where it cannot be imported."""
    return _or_none(lambda: load(name))


def _nvml(load: Importer) -> Any:
    """NVML, started; None where there is no driver."""
    nvml = _imported("pynvml", load)
    try:
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  # NVML raises a class per error code; all mean: not to be had
        return None
    return nvml


def _handles(nvml: Any) -> list[Any]:
    if nvml is None:
        return []
    return _or_none(lambda: [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]) or []


def _bus(nvml: Any, handle: Any) -> str:
    """The GPU's PCI address; "" where NVML does not tell."""
    return _or_none(lambda: str(nvml.nvmlDeviceGetPciInfo(handle).busId)) or ""


def _link(generation: Callable[[Any], int], width: Callable[[Any], int], handle: Any) -> str:
    """``gen 4 x16``"""
    read = _or_none(lambda: (generation(handle), width(handle)))
    return f"gen {read[0]} x{read[1]}" if read else MISSING


def _has_cuda(torch: Any) -> bool:
    return bool(torch is not None and _or_none(lambda: torch.cuda.is_available()))


def _or_none(reading: Callable[[], Any]) -> Any:
    """A reading, or None where the driver or the library does not give it."""
    try:
        return reading()
    except Exception:  # noqa: BLE001  # as in ``_nvml``
        return None
