"""The host pool: every token's K and V, in every mode, always complete.

One array ``[page, H, 2, p, d]`` per layer, cut into rows (a token's K or V of one head) and blocks (a page's K or V of
one head). A layout says what is next to what: ``ByPage`` for a GPU, which fetches pages, ``ByHead`` for a CPU; 8-bit
pages are by page in either case. A new token's K/V is written to it as soon as it is computed, so evicting from the
device costs nothing. Pages of a conversation that is not the current one are parked in plain host memory.

Each layer lies in one ``PinnedRegion``: its address space is reserved for the model's context and its memory committed
from the front as the conversation grows. Addresses stay, so views and captured CUDA graphs stay valid, and the device
reads and writes the pool through an alias of the same bytes. If pinning fails the pool is pageable: the same calls
gather on the CPU and copy, which is slow but correct, and cannot be captured. What was pinned stays pinned, and the
rest is tried again each time the pool grows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvchat import units
from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available, eight_bit_pages
from kvchat.kv.memory.pages import Pages
from kvchat.kv.memory.pinned import HUGE_PAGE, CudaArray, CudaRegistrar, PinnedRegion, in_system_pages

# Pinned in steps that double up to this many bytes over all layers: a step costs a call per layer and about 0.5 s/GiB.
STEP_BYTES = 256 * 2**20


class HostPool:
    """Pages of all layers. ``total`` tokens are stored; memory grows in place up to ``context`` tokens.

    ``capacity`` is the number of tokens that every layer has memory for (where it ran out while the pool grew, some
    have more), ``reserved`` the number that fit the address space: with more the pool moves.

    ``layout`` is by default the one that the geometry asks for. ``pageable_reason`` says why the device cannot
    address the pool; empty where it does.

    Raises:
        DoesNotFitError: the host has no memory for an empty conversation.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        context: int = 0,
        registrar: CudaRegistrar | None = None,
        layout: ByPage | None = None,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.total = 0
        self.pageable_reason = ""
        self.registrar = CudaRegistrar(device) if registrar is None and device.type == "cuda" else registrar
        self._layout = layout or layout_of(geometry)
        self._step = step_tokens(geometry, self._layout.page_bytes) if self.registrar else 0
        least = geometry.grown(0)
        # One more than the context: a full one still makes room for the next token.
        self._regions = self._reserved(max(least, context + 1), least)
        self._extend(self._affordable(least, least))
        self._rebuild_views()

    # ---- room

    @property
    def room(self) -> int:
        """The least number of tokens that can be stored without another ``reserve``."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        return self._committed

    @property
    def pinned(self) -> bool:
        """True if the device addresses the pool itself; otherwise nothing that uses the pool can be captured."""
        return not self.pageable_reason

    @property
    def badges(self) -> tuple[str, ...]:
        return (f"pageable host memory: {self.pageable_reason}",) if self.pageable_reason else ()

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` in all; True if the views changed: the pool or its device address moved.

        Raises:
            DoesNotFitError: the host has no memory for it; what is stored is unchanged.
        """
        if tokens <= self.capacity:
            return False
        before, moves = self._seen, tokens > self.reserved
        wanted = pool_tokens(self.geometry, tokens, self._step)
        if moves:
            self._move(tokens, wanted)
        else:
            self._extend(self._affordable(tokens, min(wanted, self.reserved)))
        return moves or self._seen != before

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens``; memory is kept for what comes next."""
        self.total = min(self.total, tokens)

    def synchronize(self) -> None:
        """Wait until what steps have written has arrived in host memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- views: of ``device`` where pinned, else of the CPU; ``gather`` and ``scatter`` take both

    @property
    def layers(self) -> list[Tensor]:
        """The pages that have memory, in host memory: ``[page, H, 2, p, d]`` a layer."""
        pages = self.capacity // self.geometry.page
        return [self._layout.table(region.bytes)[:pages] for region in self._regions]

    def table(self, layer: int) -> Tensor:
        """The layer's address space, ``[page, H, 2, p, d]``; of 8-bit pages ``[page, H, block_bytes]``."""
        return self._tables[layer]

    def rows(self, layer: int) -> Tensor:
        """The layer's address space, one row per token and head of K or V: ``[page * H * 2 * p, d]``."""
        return self._rows[layer]

    def rows_on_host(self, layer: int) -> Tensor:
        """``rows`` in host memory, also where they are pinned."""
        return self._layout.rows(self._layout.table(self._regions[layer].bytes))

    def graph_buffers(self) -> list[Tensor]:
        return self._rows

    def blocks(self, layer: int) -> Tensor:
        """The layer's address space, one row per (page, head, K or V): ``[page * H * 2, p * d]``."""
        return self.rows(layer).view(-1, self.geometry.page * self.geometry.d)

    def segments(self, layer: int, first: int, last: int) -> list[Tensor]:
        """Pages ``first`` up to ``last`` in host memory, uint8, cut where a ``cudaMemcpy`` may not go across."""
        return self._regions[layer].segments(first * self._layout.page_bytes, last * self._layout.page_bytes)

    def row_index(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Rows of K of tokens ``positions`` and KV ``heads`` (broadcast, int64); V lies ``value_rows`` further."""
        return self._layout.row_index(positions, heads, self.reserved)

    def by_head(self, layer: int) -> Tensor:
        """In unified memory the layer's address space, ``[2, H, token, d]``."""
        return self._rows[layer].view(2, self.geometry.kv_heads, -1, self.geometry.d)

    @property
    def value_rows(self) -> int:
        return self._layout.value_rows(self.reserved)

    @property
    def block_strides(self) -> tuple[int, int, int]:
        """Number of ``blocks`` from one page to the next, from one KV head to the next and from K to V."""
        return self._layout.block_strides(self.reserved)

    def quantized_at(self, positions: Tensor) -> Tensor | None:
        """True for each of ``positions`` whose token lies in an 8-bit page; None if there are no 8-bit pages."""
        return None

    @property
    def quantized_share(self) -> Tensor | None:
        """The share of tokens that lie in 8-bit pages (0-d, on the device); None where there is none."""
        return None

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Write ``k [H, n, d_k]`` and ``v [H, n, d_v]`` of the tokens from position ``start`` on."""
        positions = torch.arange(start, start + k.shape[1], device=self.device)
        heads = torch.arange(self.geometry.kv_heads, device=self.device)
        index = self.row_index(positions[None], heads[:, None]).flatten()
        rows = self.rows(layer)
        scatter(rows[:, : k.shape[2]], index, k.flatten(0, 1))
        scatter(rows[:, : v.shape[2]], index + self.value_rows, v.flatten(0, 1))

    def dense(self, layer: int, tokens: int, page: int = 0) -> tuple[Tensor, Tensor]:
        """Keys ``[H, n, d_k]`` and values ``[H, n, d_v]`` of tokens from ``page`` up to ``tokens``, on the device.

        In unified memory what is stored itself, not a copy.
        """
        g = self.geometry
        pages = self._on_device(layer, page, g.pages(tokens))
        heads_first = pages.permute(2, 1, 0, 3, 4).reshape(2, g.kv_heads, -1, g.d)[:, :, : tokens - page * g.page]
        return heads_first[0, :, :, : g.d_k], heads_first[1, :, :, : g.d_v]

    # ---- pages that come and go, between steps

    @property
    def quantized(self) -> Sequence[bool]:
        return [False] * self.geometry.pages(self.total)

    @property
    def dequantized(self) -> Set[int]:
        return frozenset()

    def stored(self, page: int) -> list[Tensor]:
        """``StoredPages.stored``, not copied."""
        return [layer[page] for layer in self.layers]

    def page_bytes(self, quantized: bool) -> int:
        """Bytes of a page of all layers, of an 8-bit one or a full-precision one."""
        g = self.geometry
        return g.layers * (eight_bit_pages.page_bytes(g) if quantized else g.page_bytes)

    def copied(self, first: int) -> Pages:
        part = slice(first, self.geometry.pages(self.total))
        layers = [layer[part].clone(memory_format=torch.contiguous_format) for layer in self.layers]
        return Pages(self.quantized[part], layers, [])

    def put(self, first: int, pages: Pages) -> None:
        """Write full-precision ``pages`` from page ``first`` on; there is room for them. ``total`` is then due."""
        for layer, kept in zip(self.layers, pages.full_precision, strict=True):
            layer[first : first + len(kept)] = kept

    # ---- inside

    @property
    def _committed(self) -> int:
        return sum(region.committed for region in self._regions)

    @property
    def _used(self) -> int:
        """Pages of memory in use, from the first on."""
        return self.geometry.pages(self.total)

    def _affordable(self, least: int, wanted: int, extra: int = 0) -> int:
        """Bytes a layer for ``wanted`` tokens, for ``least`` if memory is short; ``extra`` bytes are needed besides."""
        free, taken = available.usable(available.host_free()), self._committed
        for tokens in (wanted, least):
            size = self._layout.nbytes(tokens)
            if size * self.geometry.layers - taken + extra <= free:
                return size
        raise self._does_not_fit(
            least, f"{units.size(taken, 2)} of it are held and {units.size(free, 2)} more are free."
        )

    def _reserved(self, wanted: int, least: int) -> list[PinnedRegion]:
        """Fresh address space for ``wanted`` tokens, or ``least`` where the system gives no more."""
        reason = ""
        for tokens in (wanted, least):
            size = self._layout.reserved_bytes(tokens)
            try:
                return [PinnedRegion(size, self._layout.parts) for _ in range(self.geometry.layers)]
            except OSError as error:
                reason = f"the system has no address space for it: {error.strerror}."
        raise self._does_not_fit(least, reason)

    @property
    def _seen(self) -> tuple[bool, list[int]]:
        """Whether and where the device sees the regions."""
        return self.pinned, [region.shift for region in self._regions]

    def _on_device(self, layer: int, first: int, last: int) -> Tensor:
        """Pages ``first`` up to ``last`` of a layer, ``[page, H, 2, p, d]``."""
        if self.pinned or self.device.type != "cuda":
            return self._tables[layer][first:last]
        return self._layout.table(torch.cat([part.to(self.device) for part in self.segments(layer, first, last)]))

    def _extend(self, size: int) -> None:
        """Take memory for ``size`` bytes in each layer, in place."""
        before = self._seen
        for region in self._regions:
            if region.committed < size:
                region.commit(size)
        self._measure()
        self._pin()
        if self._seen != before:
            self._rebuild_views()

    def _pin(self) -> None:
        """Pin all that is not; where that fails the pool is pageable."""
        if self.registrar is None:
            return
        self.pageable_reason = ""
        try:
            for region in self._regions:
                region.pin(self.registrar)
        except RuntimeError as error:
            self.pageable_reason = str(error)

    def _move(self, least: int, wanted: int) -> None:
        """Move to twice the address space, which costs a copy; what lies by page is copied a layer at a time.

        Where rows are counted by head all layers move at once, because they share the count.
        """
        unified = self.geometry.unified
        size = self._affordable(least, wanted, extra=self._committed if unified else self._regions[0].committed)
        used = self._used
        self.synchronize()
        tokens = self._layout.tokens(size)
        moved = self._reserved(2 * tokens, tokens)
        if self.registrar:
            self.pageable_reason = "it is being moved"  # so that no view keeps a layer's old region
        try:
            for layer, region in enumerate(moved):
                region.commit(size)
                self._layout.table(region.bytes)[:used] = self._layout.table(self._regions[layer].bytes)[:used]
                if not unified:
                    self._regions[layer] = region
                    self._rebuild_views()
            self._regions = moved
        finally:  # even if it failed midway, every layer is complete in its old or new region
            self._pin()
            self._rebuild_views()

    def _rebuild_views(self) -> None:
        self._measure()
        self._tables = [self._table(region) for region in self._regions]
        self._rows = [self._layout.rows(table) for table in self._tables]

    def _measure(self) -> None:
        self.capacity = self._layout.tokens(min(region.committed for region in self._regions))
        self.reserved = self._layout.tokens(min(region.size for region in self._regions))

    def _table(self, region: PinnedRegion) -> Tensor:
        """The region as the device sees it, ``[page, H, 2, p, d]``; as the CPU does where it is pageable."""
        if self.device.type != "cuda" or self.pageable_reason:
            return self._layout.table(region.bytes)
        with torch.inference_mode(False):
            seen = torch.as_tensor(CudaArray(region), device=self.device)
        return self._layout.table(seen)

    def _does_not_fit(self, tokens: int, reason: str) -> DoesNotFitError:
        taken = self._layout.nbytes(tokens) * self.geometry.layers
        return DoesNotFitError(
            "There is not enough RAM for the conversation.",
            f"K/V of {self.geometry.round_up(tokens):,} tokens take {units.size(taken, 2)}; {reason}",
            "Shorten the conversation or free memory; nothing stored is lost.",
        )


def gather(view: Tensor, index: Tensor) -> Tensor:
    """Rows of a pool's view at ``index [m]`` (int64), on the device of ``index``."""
    return view.index_select(0, index.to(view.device)).to(index.device)


def scatter(view: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write ``rows`` to a pool's view at ``index [m]`` (int64)."""
    view.index_copy_(0, index.to(view.device), rows.to(view.device))


def copy_segments(segments: Sequence[Tensor], buffer: Tensor, to_device: bool) -> None:
    """Copy between host memory (uint8, cut into ``segments``) and a buffer of the same bytes on the device."""
    as_bytes, done = buffer.view(-1).view(torch.uint8), 0
    for segment in segments:
        part = as_bytes[done : done + len(segment)]
        to, source = (part, segment) if to_device else (segment, part)
        to.copy_(source, non_blocking=True)
        done += len(segment)


class ByPage:
    """``[page, H, 2, p, d]``: one (page, head) is one contiguous block of K then V, and memory grows at the end."""

    parts = 1

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes

    def nbytes(self, tokens: int) -> int:
        """Bytes of memory for ``tokens``, in whole system pages."""
        return in_system_pages(self.geometry.pages(tokens) * self.page_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        """Bytes of address space for ``tokens``."""
        return self.nbytes(tokens)

    def tokens(self, nbytes: int) -> int:
        """Whole pages of tokens that fit ``nbytes``, of memory or of address space."""
        return nbytes // self.page_bytes * self.geometry.page

    def table(self, region: Tensor) -> Tensor:
        """A region (uint8) as ``[page, H, 2, p, d]``."""
        g = self.geometry
        pages = len(region) // self.page_bytes
        return region[: pages * self.page_bytes].view(g.dtype).view(pages, g.kv_heads, 2, g.page, g.d)

    def rows(self, table: Tensor) -> Tensor:
        """All rows of a table, ``[n, d]``."""
        return table.view(-1, self.geometry.d)

    def row_index(self, positions: Tensor, heads: Tensor, reserved: int) -> Tensor:
        """Rows of K of tokens ``positions`` and ``heads`` (broadcast), where there is room for ``reserved`` tokens."""
        g = self.geometry
        page = torch.div(positions, g.page, rounding_mode="floor")
        return (page * g.kv_heads + heads) * (2 * g.page) + positions % g.page

    def value_rows(self, reserved: int) -> int:
        return self.geometry.page

    def block_strides(self, reserved: int) -> tuple[int, int, int]:
        """Number of blocks from one page to the next, from one head to the next and from K to V."""
        return 2 * self.geometry.kv_heads, 2, 1


class ByHead(ByPage):
    """``[2, H, token, d]``: a head's keys are one matrix, as are its values, so that attention reads them in place.

    Each of the ``2 * H`` parts grows by itself; address space costs nothing until it is written to.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.parts = 2 * geometry.kv_heads

    def nbytes(self, tokens: int) -> int:
        g = self.geometry
        return self.parts * in_system_pages(g.round_up(tokens) * g.row_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        # A part is whole system pages, for memory, and whole pages of tokens, for rows; a large one begins a huge page.
        size = self.geometry.round_up(tokens) * self.geometry.row_bytes
        unit = math.lcm(HUGE_PAGE if size > HUGE_PAGE else mmap.PAGESIZE, self.geometry.page * self.geometry.row_bytes)
        return self.parts * -(-size // unit) * unit

    def table(self, region: Tensor) -> Tensor:
        g = self.geometry
        by_head = region.view(g.dtype).view(2, g.kv_heads, -1, g.page, g.d)
        return by_head.permute(2, 1, 0, 3, 4)

    def rows(self, table: Tensor) -> Tensor:
        return table.permute(2, 1, 0, 3, 4).reshape(-1, self.geometry.d)

    def row_index(self, positions: Tensor, heads: Tensor, reserved: int) -> Tensor:
        return heads * reserved + positions

    def value_rows(self, reserved: int) -> int:
        return self.geometry.kv_heads * reserved

    def block_strides(self, reserved: int) -> tuple[int, int, int]:
        pages = reserved // self.geometry.page
        return 1, pages, self.geometry.kv_heads * pages


class QuantizedByPage(ByPage):
    """8-bit pages, ``[page, H, block_bytes]`` (uint8); they have no rows."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.page_bytes = eight_bit_pages.page_bytes(geometry)

    def table(self, region: Tensor) -> Tensor:
        pages, heads = len(region) // self.page_bytes, self.geometry.kv_heads
        return region[: pages * self.page_bytes].view(pages, heads, -1)

    def rows(self, table: Tensor) -> Tensor:
        return table


def layout_of(geometry: Geometry) -> ByPage:
    return ByHead(geometry) if geometry.unified else ByPage(geometry)


def layer_bytes(geometry: Geometry, tokens: int, quantized: int = 0) -> int:
    """Bytes of host memory of one layer of the pool with room for ``tokens``, and ``quantized`` ones in 8-bit pages."""
    return layout_of(geometry).nbytes(tokens) + QuantizedByPage(geometry).nbytes(quantized)


def pool_bytes(geometry: Geometry, tokens: int, context: int, quantizes: bool = False) -> int:
    """Bytes that a model's pool takes once it holds ``tokens``, in 8-bit pages where it ``quantizes``.

    For more than the ``context`` and its next token room is made only where a conversation goes beyond it.
    """
    layout = QuantizedByPage(geometry) if quantizes else layout_of(geometry)
    room = pool_tokens(geometry, tokens, 0 if geometry.unified else step_tokens(geometry, layout.page_bytes))
    if tokens <= context + 1:
        room = min(room, max(context + 1, geometry.grown(0)))
    # Beside 8-bit pages the full-precision pool is as large as an empty conversation's.
    one_layer = layer_bytes(geometry, geometry.grown(0), room) if quantizes else layer_bytes(geometry, room)
    return geometry.layers * one_layer


def pool_tokens(geometry: Geometry, tokens: int, step: int) -> int:
    """Tokens that a pool has room for once it holds ``tokens``: the same, whichever way it grew to them."""
    room = geometry.grown(0)
    while room < tokens:
        room = geometry.round_up(max(geometry.grown(room + 1), room + min(room, step)))
    return room


def step_tokens(geometry: Geometry, page_bytes: int) -> int:
    """Tokens that a pinned pool grows by at least, whose pages have ``page_bytes`` in each layer."""
    return STEP_BYTES // (geometry.layers * page_bytes) * geometry.page


@dataclass(frozen=True)
class CachedPrefix:
    """The first ``tokens`` of a conversation, as another session or an earlier moment of this one stored them.

    ``read`` puts the pages of so many tokens into an empty host pool and returns how many of them are whole;
    the first ``full_precision`` tokens are in pages before those that are or were 8-bit ones. ``control`` are the
    positions of control tokens, ``query`` is the last token's in bytes, empty if unknown.
    """

    tokens: int
    read: Callable[[HostPool, int], int]
    full_precision: int
    control: Sequence[int]
    query: bytes = b""

    @property
    def has_quantized(self) -> bool:
        """True if some of the tokens are in pages that are or were 8-bit ones."""
        return self.full_precision < self.tokens

    def beginning(self, tokens: int) -> CachedPrefix:
        control = [position for position in self.control if position < tokens]
        return replace(self, tokens=tokens, control=control, query=self.query if tokens == self.tokens else b"")


def parked(pool: HostPool) -> Pages:
    """A copy of what a host pool holds, in plain host memory."""
    pool.synchronize()
    with torch.inference_mode():
        return pool.copied(0)


def unparked(pages: Pages, pool: HostPool, tokens: int) -> int:
    """Put parked pages of the first ``tokens`` into ``pool``; return ``tokens``."""
    pool.put(0, pages.beginning(pool.geometry.pages(tokens)))
    return tokens


def parked_bytes(pool: HostPool) -> int:
    return sum(map(pool.page_bytes, pool.quantized))
