"""Rates of a device's memory and of its link to the host: the best of several runs after a warm-up.

While another process uses them they are too low.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.kv.memory import available

RUNS = 5
COLUMNS = 4096  # of the matrix that is read: the width of an 8B model
LINK_BYTES = 2**28
COPIES = 4  # that keep the link busy beside what the CPU does
# What a layer takes longer in which the CPU has a turn: one more graph, two small copies, the host's wait for the query
# and the start of its threads; assumed: `.ci/gpu 60 turn` measures it.
TURN_S = 0.0001


def read(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Bytes/s of the device's memory: the better of a matrix-vector product and a copy, which reads and writes.

    ``size`` are the bytes that are read, more than any cache holds.
    """
    rows = _affordable(device, size) // (COLUMNS * dtype.itemsize)
    matrix = torch.ones((rows, COLUMNS), dtype=dtype, device=device)
    vector, other = matrix[:1].clone(), torch.empty_like(matrix)
    product = matrix.nbytes / seconds(lambda: F.linear(vector, matrix), device)
    copy = 2 * matrix.nbytes / seconds(lambda: other.copy_(matrix), device)
    return max(product, copy)


def link(device: torch.device, to_device: bool, size: int = LINK_BYTES) -> float:
    """Bytes/s of one large copy of ``size`` bytes between host memory, pinned where that can be, and the device."""
    here, there = _ends_of_link(device, size)
    source, target = (there, here) if to_device else (here, there)
    return here.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), device)


def seconds_beside_link(run: Callable[[], None], device: torch.device, size: int = LINK_BYTES) -> float:
    """Seconds of what the CPU runs while copies of ``size`` bytes go to the device, which read the same memory."""
    here, there = _ends_of_link(device, size)

    def timed() -> float:
        for _ in range(COPIES):
            here.copy_(there, non_blocking=True)
        began = time.perf_counter()
        run()
        taken = time.perf_counter() - began
        torch.cuda.synchronize(device)
        return taken

    run()
    return min(timed() for _ in range(RUNS))


def share_on_cpu(nbytes: float, link: float, cpu: float, layers: int) -> float:
    """The share of ``nbytes`` of K/V that the CPU attends to while the rest comes over the link, by rates in bytes/s.

    Both then take as long. 0 where that saves less than a turn of the CPU in each of the ``layers`` costs.
    """
    share = cpu / (link + cpu)
    return share if share * nbytes / link > TURN_S * layers else 0.0


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
    start.record(torch.cuda.current_stream(device))
    run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _ends_of_link(device: torch.device, size: int) -> tuple[Tensor, Tensor]:
    """``size`` bytes on the device and in host memory, or fewer."""
    here = torch.ones(_affordable(device, size), dtype=torch.uint8, device=device)
    there = torch.ones(len(here), dtype=torch.uint8)
    with suppress(RuntimeError):  # K/V are pageable then too
        there = there.pin_memory()
    return here, there


def _affordable(device: torch.device, size: int) -> int:
    """``size`` bytes, at most a quarter of the device's free memory: two such tensors are allocated."""
    return min(size, available.free_bytes(device) // 4)
