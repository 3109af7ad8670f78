"""Times of decoded tokens, and the protocol of a variant: anything that decodes."""

from __future__ import annotations

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
    """Milliseconds per token by wall clock: of the median step, and the mean of all."""

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
    """Time ``step`` of each token but the first ``warm_up``, as in a chat: the next one waits until the device is
    through, because its token is read from this one's logits.
    """
    first, times = warm_up(device), []
    for number, token in enumerate(tokens):
        began = time.perf_counter()
        step(token)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= first:
            times.append(1000 * (time.perf_counter() - began))
    return Timing(statistics.median(times), statistics.fmean(times))
