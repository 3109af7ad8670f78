"""The roofline of a device: rates of its memory, of the link to the host, and of scattered pages of the host pool.

Each rate is the best of several runs after a warm-up, over data larger than any cache. While another process uses the
device the rates are too low, and a step can seem faster than its floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import kvchat
from kvchat.config.profiles import Measured
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.choose import triton_refusal

RUNS = 5
COLUMNS = 4096  # of the matrix that is read: the width of an 8B model
READ_BYTES = {"cuda": 2**30, "cpu": 2**27}
LINK_BYTES = 2**28
GATHER_TOKENS = {"cuda": 2**18, "cpu": 2**16}
# One block of 16 KiB is K or V of a page of 32 tokens: (page, head) pairs of usual models are as large.
GATHER_ROW = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}


def measure(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Measured:
    """Measure ``device``, the current one if CUDA, in GB/s; matrices and K/V are of ``dtype``.

    A CPU has no link: those rates are None.
    """
    cuda = device.type == "cuda"
    by_programs = kernel_gather(device, dtype) if cuda else {}
    return Measured(
        read=_rounded(read(device, dtype)),
        to_device=_rounded(link(device, to_device=True)) if cuda else None,
        to_host=_rounded(link(device, to_device=False)) if cuda else None,
        gather=_rounded(max(by_programs.values()) / 1e9 if by_programs else gather(device, dtype)),
        kvchat=kvchat.__version__,
        torch=torch.__version__,
    )


def read(device: torch.device, dtype: torch.dtype) -> float:
    """GB/s of the device's memory: the better of a matrix-vector product and a copy, which reads and writes."""
    size = _affordable(device, READ_BYTES[device.type])
    rows = size // (COLUMNS * dtype.itemsize)
    matrix = torch.ones((rows, COLUMNS), dtype=dtype, device=device)
    vector, other = matrix[:1].clone(), torch.empty_like(matrix)
    product = matrix.nbytes / seconds(lambda: F.linear(vector, matrix), device)
    copy = 2 * matrix.nbytes / seconds(lambda: other.copy_(matrix), device)
    return max(product, copy) / 1e9


def link(device: torch.device, to_device: bool) -> float:
    """GB/s of one large copy between pinned host memory and the device."""
    size = _affordable(device, LINK_BYTES)
    here = torch.ones(size, dtype=torch.uint8, device=device)
    there = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    source, target = (there, here) if to_device else (here, there)
    return size / seconds(lambda: target.copy_(source, non_blocking=True), device) / 1e9


def gather(device: torch.device, dtype: torch.dtype) -> float:
    """GB/s of scattered pages read from the host pool by the device, as recall without kernels reads them."""
    geometry = Geometry(1, 1, 1, GATHER_ROW[dtype], GATHER_ROW[dtype], dtype)
    host = HostPool(geometry, device, context=GATHER_TOKENS[device.type])
    host.reserve(GATHER_TOKENS[device.type])
    blocks = host.blocks(0)
    held = 2 * host.capacity // geometry.page  # the rest is address space without memory
    some = torch.randperm(held, device=blocks.device)[: held // 4]
    out = torch.empty((len(some), blocks.shape[1]), dtype=dtype, device=blocks.device)
    return out.nbytes / seconds(lambda: torch.index_select(blocks, 0, some, out=out), device) / 1e9


def kernel_gather(device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """Bytes/s of pages of pinned host memory read by the recall kernel, by its number of programs; {} without kernels.

    ``device`` is the current CUDA device.
    """
    geometry = Geometry(1, 1, 1, 128, 128, dtype)
    if triton_refusal(geometry, device):
        return {}
    from kvchat.kv.ops.triton import recall

    shape = recall.MEASURED_PAGES, 2, geometry.page, geometry.d
    source = torch.zeros(shape, dtype=dtype, pin_memory=True)
    target = torch.empty((2, shape[0], *shape[2:]), dtype=dtype, device=device)
    return recall.recall_rates(source, target)


def seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one run, the best of several; timed by events on a GPU."""
    with torch.inference_mode():
        run()
        return min(_timed(run, device) for _ in range(RUNS))


def _timed(run: Callable[[], Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _affordable(device: torch.device, size: int) -> int:
    """``size`` bytes, at most a quarter of the device's free memory: two such tensors are allocated."""
    return min(size, torch.cuda.mem_get_info(device)[0] // 4) if device.type == "cuda" else size


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
