"""Recall: copies K/V that is missing from the host pool into slots, and counts and times it."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.rounding import block_bytes
from kvchat.kv.memory.streams import SideStream, StepTimer
from kvchat.kv.ops.torch_ops import TorchOps


class Totals(NamedTuple):
    """K/V pairs that steps moved or read over the link, those they wanted, heads they corrected, bytes they moved."""

    moved: int
    wanted: int
    corrections: int
    moved_bytes: int


class Transfer:
    """Moves rows from the host pool to slots; what runs on ``side_stream`` overlaps with the layers that follow.

    ``counters [3, 4]`` (int64, on the device) are K/V pairs (a token in one layer and KV head) moved or read over the
    link, K/V pairs wanted, those of the moved that came from 8-bit pages, and heads corrected. The second row counts on
    the side stream, because two streams must not add to the same number; the third what is chosen a second time for the
    same step, which is moved but not wanted once more.
    """

    def __init__(self, geometry: Geometry, ops: TorchOps, device: torch.device) -> None:
        self.geometry = geometry
        self.ops = ops
        self.side_stream = SideStream(device)
        self.counters = torch.zeros((3, 4), dtype=torch.int64, device=device)
        self._moved_and_wanted = [row[:3] for row in self.counters]
        self.filled_bytes = 0
        self.filled_seconds = 0.0
        self.timer = StepTimer(device)

    @property
    def pair_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and KV head, of an exact page."""
        return 2 * self.geometry.row_bytes

    def load_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, again: bool = False) -> None:
        """Bring the pages ``placed [H, k]`` into the layer's page slots, which hold ``resident [H, k]`` (updated).

        Both are int64, -1 is an empty slot. ``again`` says that they replace others which were wanted for the same
        step.
        """
        row = 2 if again else int(self.side_stream.inside)
        with self.timer.copying(self.side_stream.inside):
            self.ops.move_pages(slots, layer, placed, resident, self._moved_and_wanted[row])
            resident.copy_(placed)

    def load_tokens(self, slots: DeviceSlots, layer: int, first: int, placed: Tensor, resident: Tensor) -> None:
        """Bring the tokens ``placed [H, n]`` into the layer's slots from ``first`` on, which hold ``resident [H, n]``.

        -1 in either is an empty slot. The caller updates the table.
        """
        with self.timer.copying(self.side_stream.inside):
            self.ops.move_tokens(slots, layer, first, placed, resident, self._moved_and_wanted[self.side_stream.inside])

    def load_table(self, slots: DeviceSlots, wanted: Tensor) -> None:
        """Make the table of all layers of ``slots`` equal ``wanted`` (its shape, int32), copying what is missing.

        Used between steps (entering a mode, after a prefill), so it may pick rows by their number on any device.
        """
        width = slots.layout.width(self.geometry)
        began, filled = time.perf_counter(), 0
        changed = (wanted != slots.table) & (wanted >= 0)
        for layer in range(slots.layout.first, slots.layout.last):
            t = 0 if slots.layout.shared else layer - slots.layout.first
            head, slot = changed[t].expand(width, -1).nonzero(as_tuple=True)
            position = wanted[t].expand(width, -1)[head, slot].long()
            self.ops.move_picked(slots, layer, head, position, slot)
            rounded = 0 if (kinds := self.ops.host.rounded_at(position)) is None else int(kinds.sum())
            filled += self._bytes(position.numel(), rounded)
        slots.table.copy_(wanted)
        if slots.table.is_cuda:  # else the launches alone would be timed
            torch.cuda.current_stream().synchronize()
        self.filled_bytes += filled
        self.filled_seconds += time.perf_counter() - began

    def load_into_free(self, slots: DeviceSlots, positions: Tensor, targets: Tensor, taken: Tensor) -> None:
        """Bring tokens ``positions [m]`` into slots ``targets [m]`` of an unordered layout where ``taken``."""
        layers = slots.layout.last - slots.layout.first
        self.counters[0, 0].add_(taken.sum(), alpha=layers * self.geometry.kv_heads)
        if (rounded := self.ops.host.rounded_at(positions * taken)) is not None:
            self.counters[0, 2].add_((rounded & taken).sum(), alpha=layers * self.geometry.kv_heads)
        table = slots.table[0, 0]
        entries = torch.where(taken, positions.to(torch.int32), table.index_select(0, targets))
        slots.table.index_copy_(2, targets, entries.expand(1, 1, -1))
        with self.timer.copying():
            self.ops.move_shared(slots, positions, targets, taken)

    def count_wanted(self, pairs: Tensor) -> None:
        """Add K/V pairs that a step wanted and that nothing else counts (0-d)."""
        self.counters[0, 1].add_(pairs)

    def count_fetched(self, pairs: Tensor) -> None:
        """Add K/V pairs that attention read over the link without their being moved anywhere (0-d)."""
        self.counters[0, 0].add_(pairs)
        if (share := self.ops.host.rounded_share) is not None:  # what spills is read from first to last
            self.counters[0, 2].add_((pairs * share).long())

    def count_corrections(self, heads: Tensor) -> None:
        """Add corrected heads (0-d)."""
        self.counters[0, 3].add_(heads)

    def moved_bytes(self) -> int:
        """Bytes copied to the device or read over the link so far; waits for the device."""
        return self.filled_bytes + self.totals.moved_bytes

    def _bytes(self, pairs: int, rounded: int) -> int:
        """Bytes of K/V pairs, some of them of 8-bit pages, whose scales count with each of their tokens."""
        return (pairs - rounded) * self.pair_bytes + rounded * block_bytes(self.geometry) // self.geometry.page

    @property
    def fill_rate(self) -> float:
        """Bytes per second of the fills so far; 0 before one moved anything."""
        return self.filled_bytes / self.filled_seconds if self.filled_bytes else 0.0

    @property
    def totals(self) -> Totals:
        """The counts of all steps so far; waits for the device, and takes no memory on it."""
        rows = self.counters.tolist()
        moved, _, rounded, corrections = (sum(column) for column in zip(*rows, strict=True))
        return Totals(moved, rows[0][1] + rows[1][1], corrections, self._bytes(moved, rounded))

    def join(self) -> None:
        """Make the current stream wait for the copies beside it."""
        if self.side_stream.running:
            with self.timer.waiting():
                self.side_stream.join()
