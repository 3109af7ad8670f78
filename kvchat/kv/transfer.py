"""Recall: when K/V is copied from the host pool into slots, what it costs, and the stream beside the model's.

A recall moves what is missing and nothing else. ``SideStream`` makes it hidden: on a GPU what runs in it overlaps with
the layers that follow, and the step waits for it before it ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.torch_ops import TorchOps


class SideStream:
    """A stream beside the one the model runs on; on a CPU everything simply runs in order. ``inside`` while in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._kept: list[Tensor] = []
        self._running = False
        self.inside = False

    @contextmanager
    def __call__(self, *inputs: Tensor) -> Iterator[None]:
        """What runs inside begins after everything so far, and ends before the next ``join``.

        ``inputs`` are the tensors made outside that it reads: they live until then, or their memory would be given to
        others while they are read.
        """
        self.inside = True
        try:
            if self._stream is None:
                yield
                return
            self._kept += inputs
            self._running = True
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.inside = False

    def join(self) -> None:
        """Whatever comes next begins after everything aside."""
        if self._stream is not None and self._running:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._kept.clear()
        self._running = False


class Transfer:
    """Moves rows between a host pool and slots, and counts.

    ``counters [2, 3]`` (int64, on the device) has K/V pairs (a token in one layer and KV head) moved and wanted, and
    heads corrected; the second row is what was counted aside, for two streams may not add to the same number.
    """

    def __init__(self, geometry: Geometry, ops: TorchOps, device: torch.device) -> None:
        self.geometry = geometry
        self.ops = ops
        self.side_stream = SideStream(device)
        self.counters = torch.zeros((2, 3), dtype=torch.int64, device=device)
        self.filled_bytes = 0
        self.filled_seconds = 0.0
        self.step_seconds: deque[float] = deque(maxlen=256)
        self._seconds = 0.0

    @property
    def pair_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and KV head."""
        return 2 * self.geometry.row_bytes

    def load_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor) -> None:
        """Bring the pages ``placed [H, k]`` into the layer's page slots, which hold ``resident [H, k]`` (updated)."""
        began = time.perf_counter()
        self.ops.move_pages(slots, layer, placed, resident, self.counters[int(self.side_stream.inside), :2])
        resident.copy_(placed)
        self._seconds += time.perf_counter() - began

    def load_tokens(self, slots: DeviceSlots, layer: int, first: int, placed: Tensor, resident: Tensor) -> None:
        """Bring the tokens ``placed [H, n]`` into the layer's slots from ``first`` on, which hold ``resident [H, n]``.

        -1 in either is an empty slot. The tables are the caller's business.
        """
        began = time.perf_counter()
        self.ops.move_tokens(slots, layer, first, placed, resident, self.counters[int(self.side_stream.inside), :2])
        self._seconds += time.perf_counter() - began

    def load_table(self, slots: DeviceSlots, wanted: Tensor) -> None:
        """Make the table of all layers of ``slots`` equal ``wanted`` (its shape, int32), copying what is missing.

        Used between steps (entering a mode, after a prefill), so it may pick rows by their number on any device.
        """
        g, width = self.geometry, slots.layout.width(self.geometry)
        began = time.perf_counter()
        changed = (wanted != slots.table) & (wanted >= 0)
        for layer in range(slots.layout.first, slots.layout.last):
            t = 0 if slots.layout.shared else layer - slots.layout.first
            head, slot = changed[t].expand(width, -1).nonzero(as_tuple=True)
            position = wanted[t].expand(width, -1)[head, slot].long()
            self.ops.move_picked(slots, layer, head, position, slot)
            self.filled_bytes += 2 * position.numel() * g.row_bytes
        slots.table.copy_(wanted)
        self.filled_seconds += time.perf_counter() - began

    def load_into_free(self, slots: DeviceSlots, positions: Tensor, targets: Tensor, taken: Tensor) -> None:
        """Bring tokens ``positions [m]`` into slots ``targets [m]`` of an unordered layout where ``taken``."""
        began = time.perf_counter()
        layers = slots.layout.last - slots.layout.first
        self.counters[0, 0].add_(taken.sum(), alpha=layers * self.geometry.kv_heads)
        table = slots.table[0, 0]
        entries = torch.where(taken, positions.to(torch.int32), table.index_select(0, targets))
        slots.table.index_copy_(2, targets, entries.expand(1, 1, -1))
        self.ops.move_shared(slots, positions, targets, taken)
        self._seconds += time.perf_counter() - began

    def moved_bytes(self) -> int:
        """Bytes copied to the device since the store was made; asks the device."""
        return self.filled_bytes + int(self.totals[0]) * self.pair_bytes

    @property
    def totals(self) -> Tensor:
        """``[moved, wanted, corrections]``, int64 on the device."""
        return self.counters.sum(0)

    def end_step(self) -> None:
        """Close the books of one decode step."""
        if self.ops.skip_unchanged:  # a GPU works on its own time
            self.step_seconds.append(self._seconds)
        self._seconds = 0.0
