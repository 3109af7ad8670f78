"""Measures the rates of a device's memory and link to the host; too low while other processes use them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.kv.memory import available

RUNS = 5
COLUMNS = 4096  # width of the matrix that is read, as in an 8B model
LINK_BYTES = 2**28
COPIES = 4  # queued copies that keep the link busy while the CPU is timed
# Assumed overhead per layer if the CPU takes part: one more graph, two small copies, the host's wait for the query and
# the start of its threads. `.ci/gpu 60 turn` measures it.
TURN_S = 0.0001


def read(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Measure the device's memory in bytes/s: the better of a matrix-vector product and a copy (read and write).

    ``size`` is the number of bytes read, larger than any cache.
    """
    rows = _affordable(device, size) // (COLUMNS * dtype.itemsize)
    matrix = torch.ones((rows, COLUMNS), dtype=dtype, device=device)
    vector, other = matrix[:1].clone(), torch.empty_like(matrix)
    product = matrix.nbytes / seconds(lambda: F.linear(vector, matrix), device)
    copy = 2 * matrix.nbytes / seconds(lambda: other.copy_(matrix), device)
    return max(product, copy)


def link(device: torch.device, to_device: bool, size: int = LINK_BYTES) -> float:
    """Measure one large copy of ``size`` bytes between the device and host memory, pinned if possible, in bytes/s."""
    here, there = _ends_of_link(device, size)
    source, target = (there, here) if to_device else (here, there)
    return here.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), device)


def seconds_beside_link(run: Callable[[], None], device: torch.device, size: int = LINK_BYTES) -> float:
    """Measure the seconds that ``run`` takes on the CPU while the device copies ``size`` bytes from host memory."""
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
    """Return the share of ``nbytes`` of K/V for which the CPU takes as long as the link takes for the rest.

    ``link`` and ``cpu`` are rates in bytes/s. The share is 0 if it saves less than the overhead in each of ``layers``.
    """
    share = cpu / (link + cpu)
    return share if share * nbytes / link > TURN_S * layers else 0.0


def seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """Measure the seconds of one run, as the best of several; timed by events on a GPU."""
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
    """Return at most ``size`` bytes on the device, and as many in host memory."""
    here = torch.ones(_affordable(device, size), dtype=torch.uint8, device=device)
    there = torch.ones(len(here), dtype=torch.uint8)
    with suppress(RuntimeError):  # if this fails, K/V are pageable too
        there = there.pin_memory()
    return here, there


def _affordable(device: torch.device, size: int) -> int:
    """Limit ``size`` bytes to a quarter of the device's free memory, because two such tensors are allocated."""
    return min(size, available.free_bytes(device) // 4)
