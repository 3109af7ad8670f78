"""The host pool: the K and V of every token, in every mode.

A layer is one array ``[page, H, 2, p, d]``. A row is a token's K or V of one head, a block a page's K or V of one head.
The layout in memory is ``ByPage`` for a GPU, which fetches pages, and ``ByHead`` for a CPU; 8-bit pages are always by
page. New K/V are written to the pool at once, so evicting from the device costs nothing. Pages of a conversation that
is not the current one are parked in pageable host memory.

Each layer has one ``PinnedRegion``: address space for the model's whole context, whose memory is committed from the
front as the conversation grows. Addresses do not change, so views and captured CUDA graphs stay valid, and the device
reads and writes the pool through an alias of the same bytes. If pinning fails, the pool is pageable: the same calls
gather on the CPU and copy, which is slow but correct, and cannot be captured. The pool tries again whenever it grows.
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

# Pinned memory grows in steps that double up to this many bytes over all layers. A step costs a call per layer and
# about 0.5 s/GiB.
STEP_BYTES = 256 * 2**20


class HostPool:
    """Pages of all layers. ``total`` tokens are stored; memory grows in place up to ``context`` tokens.

    ``capacity`` is the number of tokens for which every layer has memory (some layers have more if memory ran out while
    the pool grew). ``reserved`` is the number for which there is address space; for more the pool moves.

    ``layout`` is by default the geometry's. ``pageable_reason`` says why the device cannot address the pool; it is
    empty if it can.

    Raises:
        DoesNotFitError: there is not enough RAM for an empty conversation.
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
        # One more than the context, because a full conversation still makes room for the next token.
        self._regions = self._reserved(max(least, context + 1), least)
        self._extend(self._affordable(least, least))
        self._rebuild_views()

    # ---- memory

    @property
    def room(self) -> int:
        """The number of tokens that can certainly be stored without another ``reserve``."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        return self._committed

    @property
    def pinned(self) -> bool:
        """True if the device can address the pool; otherwise no work that uses the pool can be captured."""
        return not self.pageable_reason

    @property
    def badges(self) -> tuple[str, ...]:
        return (f"pageable host memory: {self.pageable_reason}",) if self.pageable_reason else ()

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` in total; return True if the pool or its device address moved, so views changed.

        Raises:
            DoesNotFitError: there is not enough RAM; the stored tokens are unchanged.
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
        """Forget all but the first ``tokens``; keep the memory for later tokens."""
        self.total = min(self.total, tokens)

    def synchronize(self) -> None:
        """Wait until all writes of steps have reached host memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- views: on ``device`` if pinned, otherwise on the CPU; ``gather`` and ``scatter`` accept both

    @property
    def layers(self) -> list[Tensor]:
        """Each layer's committed pages in host memory, ``[page, H, 2, p, d]``."""
        pages = self.capacity // self.geometry.page
        return [self._layout.table(region.bytes)[:pages] for region in self._regions]

    def table(self, layer: int) -> Tensor:
        """Return the layer's address space, ``[page, H, 2, p, d]``; of 8-bit pages ``[page, H, block_bytes]``."""
        return self._tables[layer]

    def rows(self, layer: int) -> Tensor:
        """Return the layer's address space, one row per K or V of a token and head: ``[page * H * 2 * p, d]``."""
        return self._rows[layer]

    def rows_on_host(self, layer: int) -> Tensor:
        """Return ``rows`` as a CPU tensor, even if they are pinned."""
        return self._layout.rows(self._layout.table(self._regions[layer].bytes))

    def graph_buffers(self) -> list[Tensor]:
        return self._rows

    def blocks(self, layer: int) -> Tensor:
        """Return the layer's address space, one row per (page, head, K or V): ``[page * H * 2, p * d]``."""
        return self.rows(layer).view(-1, self.geometry.page * self.geometry.d)

    def segments(self, layer: int, first: int, last: int) -> list[Tensor]:
        """Return pages ``first`` up to ``last`` in host memory (uint8), cut where a ``cudaMemcpy`` must end."""
        return self._regions[layer].segments(first * self._layout.page_bytes, last * self._layout.page_bytes)

    def row_index(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Return the rows of K of ``positions`` and KV ``heads`` (int64, broadcast); V is ``value_rows`` further."""
        return self._layout.row_index(positions, heads, self.reserved)

    def by_head(self, layer: int) -> Tensor:
        """Return the layer's address space as ``[2, H, token, d]``; only in unified memory."""
        return self._rows[layer].view(2, self.geometry.kv_heads, -1, self.geometry.d)

    @property
    def value_rows(self) -> int:
        return self._layout.value_rows(self.reserved)

    @property
    def block_strides(self) -> tuple[int, int, int]:
        """Number of ``blocks`` from one page to the next, from one KV head to the next, and from K to V."""
        return self._layout.block_strides(self.reserved)

    def quantized_at(self, positions: Tensor) -> Tensor | None:
        """Return whether each of ``positions`` is in an 8-bit page; None if there are no 8-bit pages."""
        return None

    @property
    def quantized_share(self) -> Tensor | None:
        """The share of tokens in 8-bit pages (0-d, on the device); None if there are no 8-bit pages."""
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
        """Return keys ``[H, n, d_k]`` and values ``[H, n, d_v]`` of the tokens from ``page`` up to ``tokens``.

        They are on the device; in unified memory they are views, not copies.
        """
        g = self.geometry
        pages = self._on_device(layer, page, g.pages(tokens))
        heads_first = pages.permute(2, 1, 0, 3, 4).reshape(2, g.kv_heads, -1, g.d)[:, :, : tokens - page * g.page]
        return heads_first[0, :, :, : g.d_k], heads_first[1, :, :, : g.d_v]

    # ---- pages that are saved and restored, between steps

    @property
    def quantized(self) -> Sequence[bool]:
        return [False] * self.geometry.pages(self.total)

    @property
    def dequantized(self) -> Set[int]:
        return frozenset()

    def stored(self, page: int) -> list[Tensor]:
        """Return a page of every layer as in ``StoredPages``, not copied."""
        return [layer[page] for layer in self.layers]

    def page_bytes(self, quantized: bool) -> int:
        """Return the bytes of an 8-bit or full-precision page over all layers."""
        g = self.geometry
        return g.layers * (eight_bit_pages.page_bytes(g) if quantized else g.page_bytes)

    def copied(self, first: int) -> Pages:
        part = slice(first, self.geometry.pages(self.total))
        layers = [layer[part].clone(memory_format=torch.contiguous_format) for layer in self.layers]
        return Pages(self.quantized[part], layers, [])

    def put(self, first: int, pages: Pages) -> None:
        """Write full-precision ``pages`` from page ``first`` on; there must be room. The caller then sets ``total``."""
        for layer, kept in zip(self.layers, pages.full_precision, strict=True):
            layer[first : first + len(kept)] = kept

    # ---- inside

    @property
    def _committed(self) -> int:
        return sum(region.committed for region in self._regions)

    @property
    def _used(self) -> int:
        """Number of pages in use, counted from the start of the memory."""
        return self.geometry.pages(self.total)

    def _affordable(self, least: int, wanted: int, extra: int = 0) -> int:
        """Return the bytes per layer for ``wanted`` tokens, or ``least`` if memory is short; keep ``extra`` free."""
        free, taken = available.usable(available.host_free()), self._committed
        for tokens in (wanted, least):
            size = self._layout.nbytes(tokens)
            if size * self.geometry.layers - taken + extra <= free:
                return size
        raise self._does_not_fit(
            least, f"{units.size(taken, 2)} of it are already allocated, and {units.size(free, 2)} more are free."
        )

    def _reserved(self, wanted: int, least: int) -> list[PinnedRegion]:
        """Reserve address space for ``wanted`` tokens, or for ``least`` if the system does not provide more."""
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
        """Whether, and at which offset, the device sees the regions."""
        return self.pinned, [region.shift for region in self._regions]

    def _on_device(self, layer: int, first: int, last: int) -> Tensor:
        """Return pages ``first`` up to ``last`` of a layer on the device, ``[page, H, 2, p, d]``."""
        if self.pinned or self.device.type != "cuda":
            return self._tables[layer][first:last]
        return self._layout.table(torch.cat([part.to(self.device) for part in self.segments(layer, first, last)]))

    def _extend(self, size: int) -> None:
        """Commit ``size`` bytes of memory in each layer, in place."""
        before = self._seen
        for region in self._regions:
            if region.committed < size:
                region.commit(size)
        self._measure()
        self._pin()
        if self._seen != before:
            self._rebuild_views()

    def _pin(self) -> None:
        """Pin all memory that is not pinned yet; if that fails, the pool is pageable."""
        if self.registrar is None:
            return
        self.pageable_reason = ""
        try:
            for region in self._regions:
                region.pin(self.registrar)
        except RuntimeError as error:
            self.pageable_reason = str(error)

    def _move(self, least: int, wanted: int) -> None:
        """Copy the pool to twice the address space, one layer at a time.

        With the layout by head, all layers move together, because row numbers depend on ``reserved``, which they share.
        """
        unified = self.geometry.unified
        size = self._affordable(least, wanted, extra=self._committed if unified else self._regions[0].committed)
        used = self._used
        self.synchronize()
        tokens = self._layout.tokens(size)
        moved = self._reserved(2 * tokens, tokens)
        if self.registrar:
            self.pageable_reason = "it is being moved"  # so that no view keeps a layer's old region alive
        try:
            for layer, region in enumerate(moved):
                region.commit(size)
                self._layout.table(region.bytes)[:used] = self._layout.table(self._regions[layer].bytes)[:used]
                if not unified:
                    self._regions[layer] = region
                    self._rebuild_views()
            self._regions = moved
        finally:  # even if this failed midway, every layer is complete in its old or new region
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
        """Return the region as the device sees it (if pageable, as the CPU sees it), ``[page, H, 2, p, d]``."""
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
    """Return the rows of a pool's view at ``index [m]`` (int64), on the device of ``index``."""
    return view.index_select(0, index.to(view.device)).to(index.device)


def scatter(view: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write ``rows`` to a pool's view at ``index [m]`` (int64)."""
    view.index_copy_(0, index.to(view.device), rows.to(view.device))


def copy_segments(segments: Sequence[Tensor], buffer: Tensor, to_device: bool) -> None:
    """Copy between host memory, cut into ``segments`` (uint8), and a buffer of the same size on the device."""
    as_bytes, done = buffer.view(-1).view(torch.uint8), 0
    for segment in segments:
        part = as_bytes[done : done + len(segment)]
        to, source = (part, segment) if to_device else (segment, part)
        to.copy_(source, non_blocking=True)
        done += len(segment)


class ByPage:
    """``[page, H, 2, p, d]``: each (page, head) is one contiguous block of K then V, and memory grows at the end."""

    parts = 1

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of memory for ``tokens``, in whole system pages."""
        return in_system_pages(self.geometry.pages(tokens) * self.page_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        """Return the bytes of address space for ``tokens``."""
        return self.nbytes(tokens)

    def tokens(self, nbytes: int) -> int:
        """Return how many tokens, in whole pages, fit into ``nbytes`` of memory or address space."""
        return nbytes // self.page_bytes * self.geometry.page

    def table(self, region: Tensor) -> Tensor:
        """Return a view of a region (uint8) as ``[page, H, 2, p, d]``."""
        g = self.geometry
        pages = len(region) // self.page_bytes
        return region[: pages * self.page_bytes].view(g.dtype).view(pages, g.kv_heads, 2, g.page, g.d)

    def rows(self, table: Tensor) -> Tensor:
        """Return all rows of a table, ``[n, d]``."""
        return table.view(-1, self.geometry.d)

    def row_index(self, positions: Tensor, heads: Tensor, reserved: int) -> Tensor:
        """Return the rows of K of ``positions`` and ``heads`` (broadcast) in address space for ``reserved`` tokens."""
        g = self.geometry
        page = torch.div(positions, g.page, rounding_mode="floor")
        return (page * g.kv_heads + heads) * (2 * g.page) + positions % g.page

    def value_rows(self, reserved: int) -> int:
        return self.geometry.page

    def block_strides(self, reserved: int) -> tuple[int, int, int]:
        """Return the number of blocks from one page to the next, from one head to the next, and from K to V."""
        return 2 * self.geometry.kv_heads, 2, 1


class ByHead(ByPage):
    """``[2, H, token, d]``: a head's keys and its values are one matrix each, which attention reads in place.

    Each of the ``2 * H`` parts grows separately; address space costs nothing until it is written to.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.parts = 2 * geometry.kv_heads

    def nbytes(self, tokens: int) -> int:
        g = self.geometry
        return self.parts * in_system_pages(g.round_up(tokens) * g.row_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        # A part has whole system pages, for memory, and whole pages of tokens, for rows. Each large part begins with a
        # huge page.
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
    """Return the host bytes of one layer with room for ``tokens`` in full precision and ``quantized`` in 8 bits."""
    return layout_of(geometry).nbytes(tokens) + QuantizedByPage(geometry).nbytes(quantized)


def pool_bytes(geometry: Geometry, tokens: int, context: int, quantizes: bool = False) -> int:
    """Return the bytes that a model's pool takes once it holds ``tokens``, in 8-bit pages if it ``quantizes``.

    The pool grows beyond the ``context`` and its next token only if the conversation does.
    """
    layout = QuantizedByPage(geometry) if quantizes else layout_of(geometry)
    room = pool_tokens(geometry, tokens, 0 if geometry.unified else step_tokens(geometry, layout.page_bytes))
    if tokens <= context + 1:
        room = min(room, max(context + 1, geometry.grown(0)))
    # With 8-bit pages, the full-precision pool is as large as for an empty conversation.
    one_layer = layer_bytes(geometry, geometry.grown(0), room) if quantizes else layer_bytes(geometry, room)
    return geometry.layers * one_layer


def pool_tokens(geometry: Geometry, tokens: int, step: int) -> int:
    """Return for how many tokens a pool has room once it holds ``tokens``, however it grew to them."""
    room = geometry.grown(0)
    while room < tokens:
        room = geometry.round_up(max(geometry.grown(room + 1), room + min(room, step)))
    return room


def step_tokens(geometry: Geometry, page_bytes: int) -> int:
    """Return how many tokens are in ``STEP_BYTES`` of a pinned pool whose pages have ``page_bytes`` per layer."""
    return STEP_BYTES // (geometry.layers * page_bytes) * geometry.page


@dataclass(frozen=True)
class CachedPrefix:
    """The first ``tokens`` of a conversation, stored by another session or earlier in this one.

    ``read(pool, n)`` puts the pages of the first n tokens into an empty host pool and returns how many tokens are
    intact. The first ``full_precision`` tokens are in pages before any that are or were 8-bit. ``control`` has the
    positions of control tokens; ``query`` is the last token's queries as bytes, empty if unknown.
    """

    tokens: int
    read: Callable[[HostPool, int], int]
    full_precision: int
    control: Sequence[int]
    query: bytes = b""

    @property
    def has_quantized(self) -> bool:
        """True if some of the tokens are in pages that are or were 8-bit."""
        return self.full_precision < self.tokens

    def beginning(self, tokens: int) -> CachedPrefix:
        control = [position for position in self.control if position < tokens]
        return replace(self, tokens=tokens, control=control, query=self.query if tokens == self.tokens else b"")


def parked(pool: HostPool) -> Pages:
    """Return a copy of the host pool's pages in pageable host memory."""
    pool.synchronize()
    with torch.inference_mode():
        return pool.copied(0)


def unparked(pages: Pages, pool: HostPool, tokens: int) -> int:
    """Put parked pages of the first ``tokens`` into ``pool``; return ``tokens``."""
    pool.put(0, pages.beginning(pool.geometry.pages(tokens)))
    return tokens


def parked_bytes(pool: HostPool) -> int:
    return sum(map(pool.page_bytes, pool.quantized))
