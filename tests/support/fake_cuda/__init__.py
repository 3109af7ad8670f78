"""A fake CUDA device, or two: tensors that report ``cuda:0`` and keep their elements in host memory.

``pytest --fake-cuda -m cuda`` runs the tests marked ``cuda`` on it, without a GPU. torch's CPU operations and Triton's
interpreter compute real values. What CUDA refuses is refused: operands on two devices, copies and synchronizations
during a graph capture, a copy across two segments of pinned memory, products of integer matrices. A capture has no
effect, a replay repeats it on the same memory (``tape``); unwritten memory is NaN. Tests can let the device see pinned
memory at other addresses (``gpu.elsewhere``), limit it (``pinnable``) and the device's own memory (``total``), and keep
events from completing (``behind``). Work runs immediately, so streams never overlap; instead ``races`` reports two
accesses that no stream, event or wait orders. It measures no speed and compiles no kernel.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

# After tests/conftest.py set TRITON_INTERPRET: these modules define kernels.
from support.fake_cuda import attention, interpreted, runtime
from support.fake_cuda.device import Everywhere, Numbered, gpu

from kvchat.engine import runner
from kvchat.kv import attention as dense_attention
from kvchat.kv.geometry import GROWTH_HEADROOM
from kvchat.kv.memory import pinned


def install() -> None:
    """Replace torch's CUDA by the fake device for the rest of this process."""
    from torch.nn.attention import bias  # imports torch's compiler

    _guard_device()
    for name, value in runtime.replaced().items():
        setattr(torch.cuda, name, value)
    torch.Generator = runtime.Generator
    torch.as_tensor = _with_aliases(torch.as_tensor)
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter changes its class with its data
    pinned._device_address = gpu.device_address
    GROWTH_HEADROOM["cuda"] = GROWTH_HEADROOM["cpu"]  # in the interpreter every allocated slot costs time
    runner.MEASURED_TOKENS = 128  # a forward of that many is measured for each model
    for module in (bias, dense_attention):
        module.can_use_flash_attention = attention.may_flash
        module.can_use_efficient_attention = attention.may_be_efficient
    interpreted.install()
    Numbered().__enter__()
    Everywhere().__enter__()


def _guard_device() -> None:
    """Register the CPU's device guard for CUDA, which torch without CUDA lacks."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[1] or guards[0]
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)  # otherwise torch.tensor copies to the device unnoticed


def _with_aliases(as_tensor):
    """Add CUDA's array interface to ``torch.as_tensor``."""

    def seen(data, *args, **kwargs):
        if isinstance(data, torch.Tensor) or not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data, *args, **kwargs)
        alias = gpu.alias(data.__cuda_array_interface__, torch.device(kwargs["device"]))
        alias.inner.owner = data  # keeps it alive
        return alias

    return seen
