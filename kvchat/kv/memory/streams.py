"""A CUDA stream beside the model's, so that copies overlap with the layers that follow; what a step waits for them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 256
GRAPH = 2  # first steps of a kind, which warm up and capture the graph that is timed
EVERY = 16  # steps of a kind on a GPU, of which one is timed: the events of all would take a tenth of an 8B's token


class SideStream:
    """A stream beside the current one; on a CPU everything runs in order.

    ``inside`` is true while it is entered, and its work runs beside that of another; ``running`` until ``join``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inputs: list[Tensor] = []
        self.running = False
        self.inside = False

    @contextmanager
    def __call__(self, *inputs: Tensor) -> Iterator[None]:
        """Queue the work inside behind everything queued so far; it ends before the next ``join``.

        Keep ``inputs`` alive until ``join()``; otherwise the allocator may reuse their memory while the side stream
        still reads it.
        """
        if self._stream is None:
            yield
            return
        self.inside = True
        try:
            self._inputs += inputs
            self.running = True
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.inside = False

    def join(self) -> None:
        """Make the current stream wait for the work queued on the side stream."""
        if self._stream is not None and self.running:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._inputs.clear()
        self.running = False


class RecallTime(NamedTuple):
    """Seconds of one step's copies, and for how many of them the model waited; the rest was hidden."""

    total: float
    exposed: float


class Span(NamedTuple):
    """Two events, and what the time between them counts for."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    total: bool
    exposed: bool


class StepTimer:
    """Times the copies of each step; ``steps`` are those of the last 256 that copied.

    ``timed`` counts all steps that were timed, also those that copied nothing, ``seconds`` the time of their copies.
    On a GPU one step in ``EVERY`` of a kind is timed (``times``), by events that a CUDA graph records again at each
    replay: every kind of step has its own, and one that is not timed another graph. They are read when the next step
    begins, if the device is through by then; else that step is left out, because a host that runs ahead must not wait
    for a figure. A CPU copies while the step waits, and every step is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: deque[RecallTime] = deque(maxlen=STEPS)
        self.timed, self.seconds = 0, 0.0
        self._events = device.type == "cuda"
        self.times = True
        self._begun: Counter[Hashable] = Counter()
        self._of_step = 0.0
        self._spans: dict[Hashable, list[Span]] = {}
        self._kind: Hashable = None
        self._queued = False

    def begin_forward(self, kind: Hashable) -> None:
        """Begin the forward of a step of this ``kind``; a graph's replay does not come here."""
        self._kind = kind
        if self.times:
            self._spans[kind] = []

    @contextmanager
    def copying(self, hidden: bool = False) -> Iterator[None]:
        """Time the copies queued inside; ``hidden`` if the model's work goes on beside them."""
        with self._span(total=True, exposed=not hidden):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time for which the current stream waits for copies beside it."""
        with self._span(total=False, exposed=True):
            yield

    def end_step(self, kind: Hashable) -> None:
        """All of a step of this ``kind`` was queued."""
        self._kind, self._queued = kind, self._events and self.times
        if not self._events:
            self._add(RecallTime(self._of_step, self._of_step))
            self._of_step = 0.0

    def begin_step(self, kind: Hashable) -> None:
        """Read the last step's events before they are recorded again; say whether this step of a ``kind`` is timed."""
        spans, queued, self._queued = self._spans.get(self._kind, []), self._queued, False
        if queued and all(span.end.query() for span in spans):  # type: ignore[no-untyped-call]
            timed = [(span, span.begin.elapsed_time(span.end) / 1000) for span in spans]
            total = sum(seconds for span, seconds in timed if span.total)
            self._add(RecallTime(total, min(total, sum(seconds for span, seconds in timed if span.exposed))))
        self.times = not self._events or self._begun[kind] < GRAPH or self._begun[kind] % EVERY == 0
        self._begun[kind] += 1

    def clear(self) -> None:
        """Forget the last steps: another mode begins."""
        self.steps.clear()
        self._spans.clear()
        self._queued = False
        self._begun.clear()

    def _add(self, step: RecallTime) -> None:
        self.timed += 1
        self.seconds += step.total
        if step.total > 0:
            self.steps.append(step)

    @contextmanager
    def _span(self, total: bool, exposed: bool) -> Iterator[None]:
        if not self._events:
            began = time.perf_counter()
            yield
            self._of_step += time.perf_counter() - began
            return
        if not self.times:
            yield
            return
        # External: a graph that is being captured makes them events of its own, to be timed after each replay.
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in "be")  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._spans.setdefault(self._kind, []).append(Span(begin, end, total, exposed))
