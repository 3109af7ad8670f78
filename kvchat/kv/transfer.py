"""Recall: copies missing K/V from the host pool into slots, and counts and times the copies.

On a GPU the copies run on side streams, so that they overlap with the following layers.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.eight_bit_pages import block_bytes
from kvchat.kv.memory.host_pool import copy_segments
from kvchat.kv.ops.torch_ops import TorchOps

STEPS = 256
GRAPH = 2  # The first steps of a kind are always timed: they warm up and capture the graph with the events.
EVERY = 16  # On a GPU one step in 16 of a kind is timed: events in every step would cost a tenth of an 8B's token.


class SideStream:
    """A second CUDA stream; on a CPU everything runs in order.

    ``inside`` is true while it is entered, ``running`` from then until ``join``. Its priority is higher, also in a CUDA
    graph; otherwise each small kernel would wait until thousands of thread blocks of a projection have started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Lower numbers run first; the default is 0.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._inputs: list[Tensor] = []
        self.running = False
        self.inside = False

    @contextmanager
    def __call__(self, *inputs: Tensor) -> Iterator[None]:
        """Queue the work inside behind everything queued so far; ``join`` waits for it.

        ``inputs`` are kept alive until ``join``; otherwise the allocator could reuse their memory while the side
        stream still reads it.
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
    """Seconds of one step's copies, and how many of them the model waited (``exposed``); the rest was hidden."""

    total: float
    exposed: float


class Span(NamedTuple):
    """Two events; the time between them counts as ``total`` copy time, as ``exposed`` time, or as both."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    total: bool
    exposed: bool


class StepTimer:
    """Times the copies of steps; ``steps`` has the times of the last 256 steps that copied anything.

    ``timed`` counts all timed steps, also those that copied nothing; ``seconds`` is the total time of their copies.
    On a GPU one step in ``EVERY`` of a kind is timed (``times``), by events that a CUDA graph records at each replay;
    other steps use a separate graph. The events are read when the next step begins. If the device has not finished by
    then, the step is left out, so that the host never waits for a measurement. On a CPU every step is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: deque[RecallTime] = deque(maxlen=STEPS)
        self.timed, self.seconds = 0, 0.0
        self._device, self._events = device, device.type == "cuda"
        self.times = True
        self._begun: Counter[Hashable] = Counter()
        self._of_step = 0.0
        self._spans: dict[Hashable, list[Span]] = {}
        self._kind: Hashable = None
        self._queued = False

    def begin_forward(self, kind: Hashable) -> None:
        """Begin the forward of a step of this ``kind``; not called when a graph is replayed."""
        self._kind = kind
        if self.times:
            self._spans[kind] = []

    def copying(self, hidden: bool = False) -> AbstractContextManager[None]:
        """Time the copies queued inside; they are ``hidden`` if the model computes meanwhile."""
        return self._span(total=True, exposed=not hidden)

    def waiting(self) -> AbstractContextManager[None]:
        """Time how long the current stream waits for copies on a side stream."""
        return self._span(total=False, exposed=True)

    def end_step(self, kind: Hashable) -> None:
        """Note that all work of a step of this ``kind`` was queued."""
        self._kind, self._queued = kind, self._events and self.times
        if not self._events:
            self._add(RecallTime(self._of_step, self._of_step))
            self._of_step = 0.0

    def begin_step(self, kind: Hashable) -> None:
        """Read the last step's events before they are recorded again; decide whether this step is timed."""
        spans, queued, self._queued = self._spans.get(self._kind, []), self._queued, False
        if queued and all(span.end.query() for span in spans):  # type: ignore[no-untyped-call]
            timed = [(span, span.begin.elapsed_time(span.end) / 1000) for span in spans]
            total = sum(seconds for span, seconds in timed if span.total)
            self._add(RecallTime(total, min(total, sum(seconds for span, seconds in timed if span.exposed))))
        self.times = not self._events or self._begun[kind] < GRAPH or self._begun[kind] % EVERY == 0
        self._begun[kind] += 1

    def clear(self) -> None:
        """Forget the last steps, because another mode begins."""
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
        # External: a captured graph makes them its own events, which can be read after each replay.
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in "be")  # type: ignore[no-untyped-call]
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._spans.setdefault(self._kind, []).append(Span(begin, end, total, exposed))


class Totals(NamedTuple):
    """K/V pairs that steps moved or read over the link, pairs they wanted, heads they corrected, and bytes moved."""

    moved: int
    wanted: int
    corrections: int
    moved_bytes: int


class Transfer:
    """Copies rows from the host pool to slots; copies on ``side_streams`` overlap with the following layers.

    There are two side streams, so that choosing for a layer need not wait for the previous layer's copies.

    Attributes:
        counters: int64 ``[4, 4]`` on the device. Columns: K/V pairs (one token in one layer and KV head) moved or read
            over the link; pairs wanted; moved pairs that came from 8-bit pages; heads corrected. Rows: the model's
            stream; the two side streams, because two streams must not add to the same number; second choices for the
            same step, whose pairs are moved but not wanted again.
    """

    def __init__(self, geometry: Geometry, ops: TorchOps, device: torch.device) -> None:
        self.geometry = geometry
        self.ops = ops
        self.side_streams = SideStream(device), SideStream(device)
        self.counters = torch.zeros((4, 4), dtype=torch.int64, device=device)
        self._moved_and_wanted = [row[:3] for row in self.counters]
        self.filled_bytes = 0
        self.filled_seconds = 0.0
        self.timer = StepTimer(device)

    @property
    def pair_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and KV head, in full precision."""
        return 2 * self.geometry.row_bytes

    def load_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, again: bool = False) -> None:
        """Copy the pages ``placed [H, k]`` to the layer's page slots, which hold ``resident [H, k]`` (updated).

        Both are int64; -1 is an empty slot. ``again``: they replace an earlier choice for the same step.
        """
        row = self._entered
        with self.timer.copying(row > 0):
            self.ops.move_pages(slots, layer, placed, resident, self._moved_and_wanted[-1 if again else row])
            resident.copy_(placed)

    def load_tokens(self, slots: DeviceSlots, layer: int, first: int, placed: Tensor, resident: Tensor) -> None:
        """Copy the tokens ``placed [H, n]`` to the layer's slots from ``first`` on, which hold ``resident [H, n]``.

        ``resident``, part of a table, is updated. -1 is an empty slot.
        """
        row = self._entered
        with self.timer.copying(row > 0):
            self.ops.move_tokens(slots, layer, first, placed, resident, self._moved_and_wanted[row])

    def load_table(self, slots: DeviceSlots, wanted: Tensor) -> None:
        """Make the tables of ``slots`` equal to ``wanted`` (int32, of the same shape) and copy the missing tokens.

        Only used between steps (when entering a mode, after a prefill), so shapes may depend on the data.
        """
        width = slots.layout.width(self.geometry)
        began, filled = time.perf_counter(), 0
        changed = (wanted != slots.table) & (wanted >= 0)
        for layer in range(slots.layout.first, slots.layout.last):
            t = 0 if slots.layout.shared else layer - slots.layout.first
            head, slot = changed[t].expand(width, -1).nonzero(as_tuple=True)
            position = wanted[t].expand(width, -1)[head, slot].long()
            self.ops.move_picked(slots, layer, head, position, slot)
            quantized = 0 if (which := self.ops.host.quantized_at(position)) is None else int(which.sum())
            filled += self._bytes(position.numel(), quantized)
        slots.table.copy_(wanted)
        if slots.table.is_cuda:  # otherwise only the launches would be timed
            torch.cuda.current_stream(slots.table.device).synchronize()
        self.filled_bytes += filled
        self.filled_seconds += time.perf_counter() - began

    def load_into_free(self, slots: DeviceSlots, positions: Tensor, targets: Tensor, taken: Tensor) -> None:
        """Copy tokens ``positions [m]`` to slots ``targets [m]`` of an unordered layout where ``taken`` is true."""
        layers = slots.layout.last - slots.layout.first
        self.counters[0, 0].add_(taken.sum(), alpha=layers * self.geometry.kv_heads)
        if (quantized := self.ops.host.quantized_at(positions * taken)) is not None:
            self.counters[0, 2].add_((quantized & taken).sum(), alpha=layers * self.geometry.kv_heads)
        table = slots.table[0, 0]
        entries = torch.where(taken, positions.to(torch.int32), table.index_select(0, targets))
        slots.table.index_copy_(2, targets, entries.expand(1, 1, -1))
        with self.timer.copying():
            self.ops.move_shared(slots, positions, targets, taken)

    def stage(self, slots: DeviceSlots, layer: int) -> None:
        """Start copying the layer's first ``slots.staged`` pages to ``slots.staging``, behind everything queued so far.

        ``slots.arrived`` waits for the copies; a CUDA graph can capture both. The copies are not timed, because the
        other spilled pages are read inside the attention kernel, where no event can time them.
        """
        side_stream, _ = self.side_streams
        slots.staged_layer, slots.arrived = layer, side_stream.join
        with side_stream():
            copy_segments(self.ops.host.segments(layer, 0, slots.staged), slots.staging[: slots.staged], to_device=True)

    def count_wanted(self, pairs: Tensor) -> None:
        """Count K/V pairs (0-d) that a step wanted, where no other method counts them."""
        self.counters[0, 1].add_(pairs)

    def count_fetched(self, pairs: Tensor) -> None:
        """Count K/V pairs (0-d) that attention read over the link without moving them."""
        self.counters[0, 0].add_(pairs)
        if (share := self.ops.host.quantized_share) is not None:  # the average share: all spilled pages are read
            self.counters[0, 2].add_((pairs * share).long())

    def count_corrections(self, heads: Tensor) -> None:
        self.counters[0, 3].add_(heads)

    def moved_bytes(self) -> int:
        """Return the bytes copied to the device or read over the link so far; waits for the device."""
        return self.filled_bytes + self.totals.moved_bytes

    def _bytes(self, pairs: int, quantized: int) -> int:
        """Return the bytes of K/V ``pairs``, ``quantized`` of them from 8-bit pages, with their share of the scales."""
        return (pairs - quantized) * self.pair_bytes + quantized * block_bytes(self.geometry) // self.geometry.page

    @property
    def fill_rate(self) -> float:
        """Bytes per second of the fills so far; 0 before the first that moved anything."""
        return self.filled_bytes / self.filled_seconds if self.filled_bytes else 0.0

    @property
    def totals(self) -> Totals:
        """The counts of all steps so far; waits for the device, but allocates nothing on it."""
        rows = self.counters.tolist()
        moved, _, quantized, corrections = (sum(column) for column in zip(*rows, strict=True))
        wanted = sum(row[1] for row in rows[:-1])
        return Totals(moved, wanted, corrections, self._bytes(moved, quantized))

    def side_stream(self, layer: int = 0) -> SideStream:
        """Return the side stream for choosing and copying for ``layer``; neighboring layers use different ones."""
        return self.side_streams[layer % 2]

    def join(self, *side_streams: SideStream) -> None:
        """Let the current stream wait for these side streams, or for both if none is given."""
        running = [each for each in side_streams or self.side_streams if each.running]
        if running:
            with self.timer.waiting():
                for each in running:
                    each.join()

    @property
    def _entered(self) -> int:
        """The row of ``counters`` for work queued now."""
        return next((row for row, each in enumerate(self.side_streams, 1) if each.inside), 0)
