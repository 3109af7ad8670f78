"""Device slots: space for K/V on the compute device, and the slot table with the position of the token in each slot.

Attention reads the slots whose table entry is not -1. Slots are in the order
``[pages * p | sink | pinned | window | rest of the last page]``; retrieved pages come first, so that each is one
aligned block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.pinned import use_huge_pages

EMPTY = -1
SINKS_OF_GUESS = 4  # number of first tokens that a step reads if its token is only a guess


@dataclass(frozen=True)
class Layout:
    """What the slots of layers ``first`` to ``last`` (exclusive) hold: sinks, a window, retrieved pages, pinned tokens.

    Attributes:
        shared: all layers and heads hold the same tokens and share one table.
        heads: the KV heads that have slots, equally many per layer; None for all.
        unordered: a token can be in any slot; the mode frees a slot for each new one. Only for a shared window.
        spills: attention reads tokens that left the window from the host pool. Only without pages.
        pinned: number of pinned messages' tokens, which keep their slots; other slots of these tokens are masked.
        in_place: in unified memory, there is only a table, and attention reads its tokens from the host pool. Only for
            a window that is unordered or not shared.
        staged: number of spilled pages, from the first on, that can be prefetched to a buffer shared by all layers.
    """

    first: int
    last: int
    sink: int
    window: int
    pages: int = 0
    shared: bool = True
    heads: tuple[tuple[int, ...], ...] | None = None
    unordered: bool = False
    spills: bool = False
    pinned: int = 0
    in_place: bool = False
    staged: int = 0

    @property
    def listed(self) -> bool:
        """True for a layout in place whose tables the mode rewrites in every step, before each layer attends."""
        return self.in_place and not self.shared

    def width(self, geometry: Geometry) -> int:
        """Return the number of KV heads per layer."""
        return len(self.heads[0]) if self.heads else geometry.kv_heads

    def slots(self, page: int) -> int:
        """Return the slots per KV head and layer, in whole pages."""
        return -(-(self.pages * page + self.sink + self.pinned + self.window) // page) * page

    def nbytes(self, geometry: Geometry) -> int:
        """Return the bytes that ``DeviceSlots`` with this layout allocate."""
        n = self.slots(geometry.page)
        heads = (self.last - self.first) * self.width(geometry)
        tables = (1 if self.shared else heads) * (2 - self.listed) + (self.unordered and not self.in_place)
        pages = heads * self.pages * torch.int64.itemsize
        kv = 0 if self.in_place else self.kv_bytes(geometry, n)
        return kv + pages + tables * n * torch.int32.itemsize + self.staged * geometry.page_bytes

    def kv_bytes(self, geometry: Geometry, slots: int) -> int:
        """Return the bytes of K and V of ``slots`` slots in each layer and KV head."""
        return (self.last - self.first) * self.width(geometry) * slots * 2 * geometry.row_bytes


class DeviceSlots:
    """The slots of the layers of one ``Layout``; H is its number of KV heads.

    Attributes:
        heads: ``[layers, H]``, the KV heads; None for all.
        kv: keys and values, ``[layers, 2, H, n, d]``; empty if in place.
        table: the position in each slot or -1, int32 ``[tables, H or 1, n]``; if in place, filled from the front.
        attended: the table as the last attention saw it; in a ``listed`` layout, the table itself.
        named: in a ``listed`` layout, the number of entries of each layer's table (ascending, the same for all heads).
        pages: the pages in the page slots, int64 ``[layers, H, k]``; the table says which of their tokens may be read.
        page_blocks: the rows of ``blocks`` that hold these pages, ``[H, k]``.
        held: in an unordered layout, the token in each slot, read or not, int32 ``[n]``; updated by the mode.
        current_slot: the slot of the token being decoded, int64 ``[1]``.
        ring: the first slot of the window.
        read_pairs: (token, KV head, layer) triples that attention read, summed over steps.
        recent_only: if not 0, the step's token is only a guess: attention reads no spilled tokens and, without slots,
            only the sinks and this many recent tokens.
        on_cpu: the last of the spilled tokens, to which the CPU attends.
        other_part: returns attention to other tokens, as ``attend`` takes it, if the CPU or an index covers them.
        staging: buffer for staged pages, ``[staged, kv_heads, 2, p, d]`` as in the host pool; after a call of
            ``arrived`` its first ``staged`` pages are those of layer ``staged_layer``.
        stored: by layer, ``kv`` in the form that the CPU's operations use.
    """

    def __init__(self, layout: Layout, geometry: Geometry, device: torch.device) -> None:
        self.layout = layout
        self.geometry = geometry
        self.n = layout.slots(geometry.page)
        self.offset = layout.pages * geometry.page
        self.ring = self.offset + layout.sink + layout.pinned
        layers, width = layout.last - layout.first, layout.width(geometry)
        tables = (1, 1) if layout.shared else (layers, width)
        self.heads = torch.tensor(layout.heads, device=device) if layout.heads else None
        rows = 0 if layout.in_place else self.n
        self.kv = torch.zeros((layers, 2, width, rows, geometry.d), dtype=geometry.dtype, device=device)
        use_huge_pages(self.kv)
        self.table = torch.full((*tables, self.n), EMPTY, dtype=torch.int32, device=device)
        self.attended = self.table if layout.listed else self.table.clone()
        self.named = [0] * layers
        self.held = self.table[0, 0, : rows if layout.unordered else 0].clone()
        self.pages = torch.full((layers, width, layout.pages), EMPTY, dtype=torch.int64, device=device)
        blocks = torch.arange(width, device=device)[:, None] * (self.n // geometry.page)
        self.page_blocks = blocks + torch.arange(layout.pages, device=device)
        self._all = torch.arange(geometry.kv_heads, device=device)
        self._row_starts = torch.arange(2 * width, device=device) * self.n
        self.current_slot = self._all[:1]
        self._write_rows = self._row_starts
        self.read_pairs = torch.zeros((), dtype=torch.int64, device=device)
        self.recent_only = 0
        self.staging = self._staging_buffer()
        self.staged, self.staged_layer = 0, -1
        self.on_cpu = range(0)
        self.other_part: Callable[[], Tensor] | None = None
        self.arrived: Callable[[], None] = lambda: None
        self._masks: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        self._unmasked: dict[int | None, Tensor] = {}
        self.stored: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        tables = {id(x): x for x in (self.table, self.attended)}.values()
        return sum(x.nbytes for x in (self.kv, *tables, self.held, self.pages, self.staging))

    def graph_buffers(self) -> list[Tensor]:
        constants = [self.page_blocks, self._all, self._row_starts, *([] if self.heads is None else [self.heads])]
        changed = [self.kv, self.table, self.attended, self.held, self.pages, self.read_pairs, self.staging]
        return [*changed, *constants]

    def heads_of(self, layer: int) -> Tensor:
        """Return the layer's KV heads, ``[H]`` int64."""
        return self._all if self.heads is None else self.heads[layer - self.layout.first]

    def pick(self, layer: int, tensor: Tensor, dim: int) -> Tensor:
        """Select the KV heads that have slots here along ``dim`` (all KV heads) of ``tensor``."""
        return tensor if self.heads is None else tensor.index_select(dim, self.heads_of(layer))

    def keys(self, layer: int) -> Tensor:
        """``[H, n, d_k]``"""
        return self.kv[layer - self.layout.first, 0, :, :, : self.geometry.d_k]

    def values(self, layer: int) -> Tensor:
        """``[H, n, d_v]``"""
        return self.kv[layer - self.layout.first, 1, :, :, : self.geometry.d_v]

    def rows(self, layer: int) -> Tensor:
        """``[2 * H * n, d]``; V is ``H * n`` rows after K."""
        return self.kv[layer - self.layout.first].view(-1, self.geometry.d)

    def blocks(self, layer: int) -> Tensor:
        """One row per page of slots, ``[2 * H * n / p, p * d]``."""
        return self.kv[layer - self.layout.first].view(-1, self.geometry.page * self.geometry.d)

    def table_of(self, layer: int) -> Tensor:
        """Return the layer's table, ``[H or 1, n]``."""
        return self.table[0 if self.layout.shared else layer - self.layout.first]

    def attended_of(self, layer: int) -> Tensor:
        """Return the position in each slot that the layer's last attention could read, ``[H or 1, n]``."""
        return self.attended[0 if self.layout.shared else layer - self.layout.first]

    def pages_of(self, layer: int) -> Tensor:
        """Return the pages in the layer's page slots, ``[H, k]``."""
        return self.pages[layer - self.layout.first]

    def slot_of(self, positions: Tensor) -> Tensor:
        """Return the slots of tokens that are sinks (in order) or in the window (a ring)."""
        s, w = self.layout.sink, self.layout.window
        return torch.where(positions < s, self.offset + positions, self.ring + (positions - s) % max(1, w))

    def assign(self, position: Tensor) -> None:
        """Give the token at ``position`` (0-d int64) its slot in every table; release the token that was there."""
        if not self.n or self.layout.listed:
            return
        if self.layout.unordered:  # an empty slot; any if all are taken
            empty = self.table[0, 0] == EMPTY
            slot = (~empty).sum() if self.layout.in_place else empty.to(torch.int32).topk(1).indices
        else:
            slot = self.slot_of(position)
        entry = position.to(torch.int32).expand(*self.table.shape[:2], 1)
        self.table.index_copy_(2, slot.view(1), entry)
        self.current_slot = slot.view(1)
        self._write_rows = self._row_starts + slot

    def write(self, layer: int, kv: Tensor) -> None:
        """Write the new token's ``kv [2, kv_heads, d]`` to its slot, if there are any."""
        if self.kv.shape[3]:
            self.rows(layer).index_copy_(0, self._write_rows, self.pick(layer, kv, 1).flatten(0, 1))

    def open_pages(self, layers: slice, first: int, last: Tensor) -> None:
        """Let attention read the tokens from ``first`` to ``last`` (0-d int64, inclusive) in the resident pages."""
        p = self.geometry.page
        pages = self.pages[layers, :, :, None]
        tokens = pages * p + torch.arange(p, device=pages.device)
        masked = (pages < 0) | (tokens < first) | (tokens > last)
        self.table[layers, :, : self.offset] = tokens.masked_fill(masked, EMPTY).flatten(2).to(torch.int32)

    def list_range(self, layer: int, first: int, end: int) -> None:
        """List the tokens from ``first`` up to ``end`` in the layer's table."""
        table, n = self.table_of(layer), end - first
        table[:, :n] = torch.arange(first, end, dtype=torch.int32)
        table[:, n:] = EMPTY
        self.named[layer - self.layout.first] = n

    def truncate(self, tokens: int) -> None:
        """Release all tokens from position ``tokens`` on, and the page with that position, which will be rewritten."""
        self.table.masked_fill_(self.table >= tokens, EMPTY)
        self.pages.masked_fill_(self.pages >= tokens // self.geometry.page, EMPTY)

    def grown(self, layout: Layout) -> DeviceSlots:
        """Return the same tokens in more slots; only for unordered layouts and windows that have not wrapped around.

        If only ``spills`` or ``staged`` change, the slots stay where they are.
        """
        if replace(layout, spills=self.layout.spills, staged=self.layout.staged) == self.layout:
            self.layout = layout
            self.staging = self._staging_buffer()
            return self
        if layout.unordered:
            return self._compacted(layout)
        larger = DeviceSlots(layout, self.geometry, self.table.device)
        rest = self.n - self.offset
        for old, new in (
            (slice(0, self.offset), slice(0, self.offset)),
            (slice(self.offset, self.n), slice(larger.offset, larger.offset + rest)),
        ):
            larger.kv[:, :, :, new] = self.kv[:, :, :, old]
            larger.table[:, :, new] = self.table[:, :, old]
            larger.attended[:, :, new] = self.attended[:, :, old]
        larger.pages[:, :, : self.pages.shape[2]] = self.pages
        larger.read_pairs = self.read_pairs
        return larger

    def _staging_buffer(self) -> Tensor:
        g, device = self.geometry, self.table.device
        return torch.empty((self.layout.staged, g.kv_heads, 2, g.page, g.d), dtype=g.dtype, device=device)

    def _compacted(self, layout: Layout) -> DeviceSlots:
        """Return slots of ``layout`` with the tokens of this unordered layout moved to the front."""
        other = DeviceSlots(layout, self.geometry, self.table.device)
        n = min(self.n, other.n)
        held, read = (
            (table[0, 0] == EMPTY).to(torch.int8).argsort(stable=True)[:n] for table in (self.table, self.attended)
        )
        if not layout.in_place:
            other.kv[:, :, :, :n] = self.kv.index_select(3, held)
        other.table[..., :n] = self.table[..., held]
        other.attended[..., :n] = self.attended[..., read]
        other.read_pairs = self.read_pairs
        return other

    def begin_step(self) -> None:
        self._masks.clear()
        self._unmasked.clear()

    def bias(self, layer: int, position: Tensor, window: int | None) -> Tensor:
        """Return the additive mask ``[H or 1, 1, n]``: 0 if the layer may read the slot, otherwise -inf.

        Counts what is read, so call it once per layer and step. Layers with the same table and window share a mask.
        """
        key = (0 if self.layout.shared else layer, window)
        if key not in self._masks:
            table = self.table_of(layer)
            self.attended_of(layer).copy_(table)
            masked = table < 0
            if window is not None:
                masked = masked | (table <= position - window)
            bias = torch.zeros(table.shape, dtype=self.geometry.dtype, device=table.device)
            bias.masked_fill_(masked, float("-inf"))
            heads = self.layout.width(self.geometry) // table.shape[0]
            self._masks[key] = bias.unsqueeze(1), (~masked).sum() * heads
        bias, pairs = self._masks[key]
        self.read_pairs += pairs
        return bias

    def unmasked(self, bias: Tensor, window: int | None) -> Tensor:
        """Return the slots that ``bias``, the mask of a shared table and a window, allows: int32 ``[1, m]``."""
        if window not in self._unmasked:
            self._unmasked[window] = (bias[0, 0] == 0).nonzero().view(1, -1).to(torch.int32)
        return self._unmasked[window]
