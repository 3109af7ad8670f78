"""A stand-in for a CUDA GPU: tensors that say they are on ``cuda:0`` and have their elements in host memory.

``pytest --pretend-cuda -m cuda`` runs the tests marked ``cuda`` on it, without a GPU. Real values are computed, by
torch's operations for the CPU and by Triton's interpreter. What CUDA refuses is refused: operands on two devices,
reading back or sending while a graph is captured, a copy across two segments of pinned memory, products of integers.
A capture carries nothing out (what it writes is put back), a replay carries out again what was captured, on the memory
it had. Work is carried out when it is given, so streams never overlap; but two accesses that nothing orders are a
``races.Race``. What it cannot show: how fast anything is, and what CUDA's own compiler makes of a kernel.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

# After Triton was told to interpret (tests/conftest.py), for they define kernels.
from support.fake_cuda import attention, interpreted, runtime
from support.fake_cuda.device import Everywhere, Numbered, gpu
from torch.nn.attention import bias

from kvchat.kv import attention as dense_attention
from kvchat.kv.memory import host_pool


def install() -> None:
    """Make this process believe that it has a GPU, until it ends."""
    _guard_device()
    for name, value in runtime.replaced().items():
        setattr(torch.cuda, name, value)
    torch.Generator = runtime.Generator
    torch.as_tensor = _with_aliases(torch.as_tensor)
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter's class changes where its data do
    host_pool._device_address = lambda address: address
    for module in (bias, dense_attention):
        module.can_use_flash_attention = attention.may_flash
        module.can_use_efficient_attention = attention.may_be_efficient
    interpreted.install()
    Numbered().__enter__()
    Everywhere().__enter__()


def _guard_device() -> None:
    """torch without CUDA has nothing that makes a GPU current; what it has for the CPU will do."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[1] or guards[0]
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor copies to the device unseen


def _with_aliases(as_tensor):
    """``torch.as_tensor`` that knows of CUDA's array interface."""

    def seen(data, *args, **kwargs):
        if isinstance(data, torch.Tensor) or not hasattr(data, "__cuda_array_interface__"):
            return as_tensor(data, *args, **kwargs)
        alias = gpu.alias(data.__cuda_array_interface__)
        alias.inner.owner = data  # lives as long
        return alias

    return seen
