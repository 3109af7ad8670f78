"""Choose which implementation of a step's operations to use."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.cpu_ops import CpuOps
from kvchat.kv.ops.eight_bit_ops import EightBitCpuOps, EightBitOps
from kvchat.kv.ops.torch_ops import TorchOps


def choose_ops(geometry: Geometry, host: HostPool, device: torch.device) -> TorchOps:
    """Return Triton's operations where they work, else plain torch's, which alone take a pageable pool."""
    quantizes = isinstance(host, EightBitPool)
    if device.type == "cpu":
        return (EightBitCpuOps if quantizes else CpuOps)(geometry, host, device)
    in_torch = EightBitOps if quantizes else TorchOps
    if not host.pinned:
        return in_torch(geometry, host, device)
    refusal = triton_refusal(geometry, device, quantizes)
    if refusal:
        return in_torch(geometry, host, device, refusal)
    from kvchat.kv.ops.triton_ops import EightBitTritonOps, TritonOps  # triton is not installed everywhere

    return (EightBitTritonOps if quantizes else TritonOps)(geometry, host, device)


def triton_refusal(geometry: Geometry, device: torch.device, quantizes: bool = False) -> str:
    """Return why the Triton kernels cannot serve this geometry on a CUDA device; "" if they can.

    ``quantizes``: the host pool has 8-bit pages. The first call runs every kernel once (``verify``).
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if geometry.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels are for bfloat16 and float16, not {str(geometry.dtype).removeprefix('torch.')}"
    from kvchat.kv.ops.verify import kernel_failure  # imports triton

    # The number of layers and the pool's growth do not matter: one check serves all.
    return kernel_failure(replace(geometry, layers=1, headroom=geometry.page), device, quantizes)
