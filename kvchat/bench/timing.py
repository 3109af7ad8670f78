"""Times of decoded tokens, and the protocol of a variant: anything that decodes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Steps before those that count: the first compile and allocate; on a GPU each kind of step (sync mode has five) runs
# once before it is captured.
WARM_UP = {"cpu": 3, "cuda": 12}


@dataclass(frozen=True)
class Timing:
    """Milliseconds per token: the median step (by events on a GPU), and wall clock over all steps."""

    ms: float
    wall_ms: float


class Variant(Protocol):
    """One side of a comparison: decodes the same tokens after the same context as all others."""

    name: str

    @property
    def figures(self) -> dict[str, Any]:
        """Further columns of its row, valid after a measurement."""
        ...

    def measure(self, tokens: Sequence[int]) -> Timing:
        """Decode ``tokens`` after the context; the first ``warm_up`` do not count."""
        ...

    def close(self) -> None:
        """Release memory."""
        ...


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current CUDA device inside the context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def warm_up(device: torch.device) -> int:
    """Return the number of steps before those that count."""
    return WARM_UP[device.type]


def time_steps(step: Callable[[int], object], tokens: Sequence[int], device: torch.device) -> Timing:
    """Time ``step`` of each token but the first ``warm_up``. On a GPU nothing waits for the device in between."""
    first = warm_up(device)
    for token in tokens[:first]:
        step(token)
    return (_on_gpu if device.type == "cuda" else _on_cpu)(step, tokens[first:], device)


def event() -> torch.cuda.Event:
    """Create a CUDA event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _on_cpu(step: Callable[[int], object], tokens: Sequence[int], _device: torch.device) -> Timing:
    times = []
    for token in tokens:
        began = time.perf_counter()
        step(token)
        times.append(1000 * (time.perf_counter() - began))
    return Timing(statistics.median(times), statistics.fmean(times))


def _on_gpu(step: Callable[[int], object], tokens: Sequence[int], device: torch.device) -> Timing:
    events = [event() for _ in range(len(tokens) + 1)]
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    events[0].record()
    for token, after in zip(tokens, events[1:], strict=True):
        step(token)
        after.record()
    torch.cuda.synchronize(device)
    wall_ms = 1000 * (time.perf_counter() - began) / len(tokens)
    times = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]
    return Timing(statistics.median(times), wall_ms)
