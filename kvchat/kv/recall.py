"""Recall: copying K/V from the host pool into slots; the only file that moves data to the device.

A recall moves what is missing and nothing else. Where the device is the host, the rows that changed are picked
out first, which is free there; a GPU would have to be asked for their number, so it copies all rows of the
selection, unchanged ones onto themselves. Both give the same slots.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.host import HostPool
from kvchat.kv.pool import Slots


class Recall:
    """Moves rows between a host pool and slots, and counts: device counters ``[moved, wanted, corrections]``.

    ``moved`` and ``wanted`` count K/V pairs (a token in one layer and KV head), ``corrections`` (layer, KV head) pairs.
    """

    def __init__(self, geometry: Geometry, host: HostPool, device: torch.device) -> None:
        self.geometry = geometry
        self.host = host
        self.compact = device.type == "cpu"
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)
        self.filled_bytes = 0
        self.filled_seconds = 0.0
        self.step_seconds: deque[float] = deque(maxlen=256)
        self._seconds = 0.0

    @property
    def pair_bytes(self) -> int:
        """Bytes of K and V of one token in one layer and KV head."""
        return 2 * self.geometry.row_bytes

    def pages(self, slots: Slots, layer: int, placed: Tensor, resident: Tensor) -> None:
        """Bring the pages ``placed [H, k]`` into the layer's page slots, which hold ``resident [H, k]`` (updated)."""
        began = time.perf_counter()
        g = self.geometry
        changed = (placed != resident) & (placed >= 0)
        self._count(changed, placed, g.page)
        source = (placed.clamp(min=0) * g.kv_heads + slots.heads_of(layer)[:, None]) * 2
        target = slots.page_blocks
        if self.compact:
            source, target = source[changed], target[changed]
        v_target = placed.shape[0] * slots.n // g.page
        self._copy(self.host.blocks(layer), slots.blocks(layer), source.flatten(), 1, target.flatten(), v_target)
        resident.copy_(placed)
        self._seconds += time.perf_counter() - began

    def placed(self, slots: Slots, layer: int, first: int, placed: Tensor, resident: Tensor) -> None:
        """Bring the tokens ``placed [H, n]`` into the layer's slots from ``first`` on, which hold ``resident [H, n]``.

        -1 in either is an empty slot. The tables are the caller's business.
        """
        began = time.perf_counter()
        changed = (placed != resident) & (placed >= 0)
        self._count(changed, placed)
        width, n = placed.shape
        source = self.host.row_index(placed.clamp(min=0), slots.heads_of(layer)[:, None])
        row = torch.arange(width, device=placed.device)[:, None]
        target = row * slots.n + first + torch.arange(n, device=placed.device)
        if self.compact:
            source, target = source[changed], target[changed]
        rows = slots.rows(layer)
        self._copy(self.host.rows(layer), rows, source.flatten(), self.geometry.page, target.flatten(), width * slots.n)
        self._seconds += time.perf_counter() - began

    def tokens(self, slots: Slots, wanted: Tensor) -> None:
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
            source = self.host.row_index(position, slots.heads_of(layer)[head])
            rows, target = slots.rows(layer), head * slots.n + slot
            self._copy(self.host.rows(layer), rows, source, g.page, target, width * slots.n)
            self.filled_bytes += 2 * source.numel() * g.row_bytes
        slots.table.copy_(wanted)
        self.filled_seconds += time.perf_counter() - began

    def into(self, slots: Slots, positions: Tensor, targets: Tensor, taken: Tensor) -> None:
        """Bring tokens ``positions [m]`` into slots ``targets [m]`` of a loose layout where ``taken [m]`` (bool).

        One copy a layer, of fixed shape on a GPU: a slot that is not taken gets once more what it holds.
        """
        began = time.perf_counter()
        self.counters[0] += taken.sum() * (slots.layout.last - slots.layout.first) * self.geometry.kv_heads
        if self.compact:
            positions, targets = positions[taken], targets[taken]
        else:
            positions = torch.where(taken, positions, slots.table[0, 0, targets].long())
        slots.table.index_copy_(2, targets, positions.to(torch.int32).expand(1, 1, -1))
        source = self.host.row_index(positions.clamp(min=0), slots.heads_of(slots.layout.first)[:, None])
        width = len(source)
        target = torch.arange(width, device=targets.device)[:, None] * slots.n + targets
        rows = source.flatten(), self.geometry.page, target.flatten(), width * slots.n
        if len(targets):
            for layer in range(slots.layout.first, slots.layout.last):
                self._copy(self.host.rows(layer), slots.rows(layer), *rows)
        self._seconds += time.perf_counter() - began

    def moved_bytes(self) -> int:
        """Bytes copied to the device since the store was made; asks the device."""
        return self.filled_bytes + int(self.counters[0]) * self.pair_bytes

    def end_step(self) -> None:
        """Close the books of one decode step."""
        self.step_seconds.append(self._seconds)
        self._seconds = 0.0

    def _count(self, changed: Tensor, placed: Tensor, pairs: int = 1) -> None:
        """Note what moves and what is wanted, ``pairs`` K/V pairs each."""
        self.counters[:2].add_(torch.stack((changed, placed >= 0)).sum((1, 2)), alpha=pairs)

    def _copy(self, host: Tensor, slots: Tensor, source: Tensor, v_source: int, target: Tensor, v_target: int) -> None:
        """Copy rows ``source`` of K, and of V ``v_source`` further, to rows ``target`` and ``v_target`` further."""
        both = torch.cat((source, source + v_source))
        slots.index_copy_(0, torch.cat((target, target + v_target)), host.index_select(0, both))
