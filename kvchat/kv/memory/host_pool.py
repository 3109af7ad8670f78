"""The host pool: every token's K and V, in every mode, always complete.

One array ``[page, H, 2, p, d]`` per layer; ``arrangement`` says how it lies in memory. A new token's K/V is written
through as soon as it is computed; leaving the device then costs nothing.

Each layer lies in one ``PinnedRegion``: its address space is reserved for the model's context and its memory committed
from the front as the conversation grows. Addresses stay, so views and captured CUDA graphs stay valid, and the device
reads and writes the pool through an alias of the same bytes. Where pinning fails the pool stays pageable: the
same calls gather on the CPU and copy, which is slow but right, and cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from kvchat import units
from kvchat.errors import DoesNotFitError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available, rounding
from kvchat.kv.memory.arrangement import ByPage, arrangement_of
from kvchat.kv.memory.pages import Pages
from kvchat.kv.memory.pinned import CudaArray, CudaRegistrar, PinnedRegion, Registrar
from kvchat.kv.memory.pool_size import pool_tokens, step_tokens


class HostPool:
    """Pages of all layers. ``total`` tokens are stored; memory grows in place up to ``context`` tokens.

    ``arrangement`` is by default the one that the geometry asks for. ``pageable_reason`` says why the device cannot
    address the pool; empty where it does.

    Raises:
        DoesNotFitError: the host has no memory for an empty conversation.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        context: int = 0,
        registrar: Registrar | None = None,
        arrangement: ByPage | None = None,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.total = 0
        self.pageable_reason = ""
        self.registrar = CudaRegistrar(device) if registrar is None and device.type == "cuda" else registrar
        self._lies = arrangement or arrangement_of(geometry)
        self._step = step_tokens(geometry, self._lies.page_bytes) if self.registrar else 0
        least = geometry.grown(0)
        # One more than the context: a full one still makes room for the next token.
        self._regions = self._reserved(max(least, context + 1), least)
        self._extend(self._affordable(least, least))
        self._look()

    # ---- room

    @property
    def capacity(self) -> int:
        """Tokens there is memory for in every layer: where memory ran out while it grew, some have more."""
        return self._lies.tokens(min(region.committed for region in self._regions))

    @property
    def reserved(self) -> int:
        """Tokens that fit the reserved address space: with more the pool moves."""
        return self._lies.tokens(min(region.size for region in self._regions))

    @property
    def room(self) -> int:
        """Tokens that can be stored without another ``reserve``, at least."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken."""
        return self._committed

    @property
    def pinned(self) -> bool:
        """True if the device addresses the pool itself; otherwise nothing that uses the pool can be captured."""
        return not self.pageable_reason

    @property
    def badges(self) -> tuple[str, ...]:
        """Warnings about how the pool is kept, for the screen."""
        return (f"pageable host memory: {self.pageable_reason}",) if self.pageable_reason else ()

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` in all; True when the views changed: the pool moved, or is no longer pinned.

        Raises:
            DoesNotFitError: the host has no memory for it; what is stored is unchanged.
        """
        if tokens <= self.capacity:
            return False
        was_pinned, moves = self.pinned, tokens > self.reserved
        wanted = pool_tokens(self.geometry, tokens, self._step)
        if moves:
            self._move(tokens, wanted)
        else:
            self._extend(self._affordable(tokens, min(wanted, self.reserved)))
        return moves or self.pinned != was_pinned

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens``; memory is kept for what comes next."""
        self.total = min(self.total, tokens)

    def synchronize(self) -> None:
        """Wait until what steps wrote through has arrived in host memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- views: of ``device`` where pinned, else of the CPU; ``gather`` and ``scatter`` take both

    @property
    def layers(self) -> list[Tensor]:
        """The pages that have memory, in host memory: ``[page, H, 2, p, d]`` a layer."""
        pages = self.capacity // self.geometry.page
        return [self._lies.table(region.bytes)[:pages] for region in self._regions]

    def table(self, layer: int) -> Tensor:
        """The layer's address space, ``[page, H, 2, p, d]``; of 8-bit pages ``[page, H, block_bytes]``."""
        return self._tables[layer]

    def rows(self, layer: int) -> Tensor:
        """The layer's address space, one row per token and head of K or V: ``[page * H * 2 * p, d]``."""
        return self._rows[layer]

    def graph_buffers(self) -> list[Tensor]:
        """Return the tensors by which a step finds the pool; they last from step to step."""
        return [self._rows[0], self._rows[-1]]

    def blocks(self, layer: int) -> Tensor:
        """The layer's address space, one row per (page, head, K or V): ``[page * H * 2, p * d]``."""
        return self.rows(layer).view(-1, self.geometry.page * self.geometry.d)

    def segments(self, layer: int, first: int, last: int) -> list[Tensor]:
        """Pages ``first`` up to ``last`` in host memory, uint8, cut where a ``cudaMemcpy`` may not go across."""
        return self._regions[layer].segments(first * self._lies.page_bytes, last * self._lies.page_bytes)

    def row_index(self, positions: Tensor, heads: Tensor) -> Tensor:
        """Rows of K of tokens ``positions`` and KV ``heads`` (broadcast, int64); V lies ``value_rows`` further."""
        return self._lies.row_index(positions, heads, self.reserved)

    def by_head(self, layer: int) -> Tensor:
        """In unified memory the layer's address space, ``[2, H, token, d]``."""
        return self._rows[layer].view(2, self.geometry.kv_heads, -1, self.geometry.d)

    @property
    def value_rows(self) -> int:
        """Number of rows from a token's K to its V."""
        return self._lies.value_rows(self.reserved)

    @property
    def block_strides(self) -> tuple[int, int, int]:
        """Number of ``blocks`` from one page to the next, from one KV head to the next and from K to V."""
        return self._lies.block_strides(self.reserved)

    def rounded_at(self, positions: Tensor) -> Tensor | None:
        """True for each of ``positions`` whose token lies in an 8-bit page; None if there are no 8-bit pages."""
        return None

    @property
    def rounded_share(self) -> Tensor | None:
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
        pages = self._tables[layer][page : g.pages(tokens)].to(self.device)
        heads_first = pages.permute(2, 1, 0, 3, 4).reshape(2, g.kv_heads, -1, g.d)[:, :, : tokens - page * g.page]
        return heads_first[0, :, :, : g.d_k], heads_first[1, :, :, : g.d_v]

    # ---- pages that come and go, between steps

    @property
    def kinds(self) -> Sequence[bool]:
        """``StoredPages.kinds``"""
        return [False] * self.geometry.pages(self.total)

    @property
    def cut_off(self) -> Set[int]:
        """``StoredPages.cut_off``"""
        return frozenset()

    def stored(self, page: int) -> list[Tensor]:
        """``StoredPages.stored``, not copied."""
        return [layer[page] for layer in self.layers]

    def page_bytes(self, kind: bool) -> int:
        """Bytes of a page of all layers, of an 8-bit one or an exact one."""
        g = self.geometry
        return g.layers * (rounding.page_bytes(g) if kind else g.page * g.token_bytes // g.layers)

    def copied(self, first: int) -> Pages:
        """Copies of the pages from ``first`` on."""
        part = slice(first, self.geometry.pages(self.total))
        layers = [layer[part].clone(memory_format=torch.contiguous_format) for layer in self.layers]
        return Pages(self.kinds[part], layers, [])

    def put(self, first: int, pages: Pages) -> None:
        """Write ``pages``, exact ones, from page ``first`` on; there is room for them. ``total`` is then due."""
        for layer, kept in zip(self.layers, pages.exact, strict=True):
            layer[first : first + len(kept)] = kept

    # ---- inside

    @property
    def _committed(self) -> int:
        return sum(region.committed for region in self._regions)

    @property
    def _used(self) -> int:
        """Pages of memory in use, from the first on."""
        return self.geometry.pages(self.total)

    def _affordable(self, least: int, wanted: int, beside: int = 0) -> int:
        """Bytes a layer for ``wanted`` tokens, or for ``least`` if memory is short; ``beside`` more bytes are needed.

        Raises:
            DoesNotFitError: nor for that.
        """
        free, taken = available.usable(available.host_free()), self._committed
        for tokens in (wanted, least):
            size = self._lies.nbytes(tokens)
            if size * self.geometry.layers - taken + beside <= free:
                return size
        raise self._does_not_fit(
            least, f"{units.size(taken, 2)} of it are held and {units.size(free, 2)} more are free."
        )

    def _reserved(self, wanted: int, least: int) -> list[PinnedRegion]:
        """Fresh address space for ``wanted`` tokens, or ``least`` where the system gives no more.

        Raises:
            DoesNotFitError: nor that.
        """
        reason = ""
        for tokens in (wanted, least):
            size = self._lies.reserved_bytes(tokens)
            try:
                return [PinnedRegion(size, self._lies.parts) for _ in range(self.geometry.layers)]
            except OSError as error:
                reason = f"the system gives no address space for it: {error.strerror}."
        raise self._does_not_fit(least, reason)

    def _extend(self, size: int) -> None:
        """Take memory for ``size`` bytes in each layer, in place."""
        for region in self._regions:
            if region.committed < size:
                self._commit(region, size)

    def _move(self, least: int, wanted: int) -> None:
        """Move to twice the address space, which costs a copy; what lies by page is copied a layer at a time.

        Where rows are counted by head all layers move at once, because they share the count.
        """
        unified = self.geometry.unified
        size = self._affordable(least, wanted, beside=self._committed if unified else self._regions[0].committed)
        used = self._used
        self.synchronize()
        tokens = self._lies.tokens(size)
        moved = self._reserved(2 * tokens, tokens)
        for layer, region in enumerate(moved):
            self._commit(region, size)
            self._lies.table(region.bytes)[:used] = self._lies.table(self._regions[layer].bytes)[:used]
            if not unified:
                self._regions[layer] = region
                self._look()
        if unified:
            self._regions = moved
            self._look()

    def _commit(self, region: PinnedRegion, size: int) -> None:
        """Take memory for the first ``size`` bytes of a region and pin it; where that fails all becomes pageable."""
        segment = region.commit(size)
        if self.registrar is None or self.pageable_reason:
            return
        try:
            region.register(self.registrar, segment)
        except RuntimeError as error:
            self.pageable_reason = str(error)
            for each in self._regions:
                each.unregister()
            self._look()

    def _look(self) -> None:
        """Make the views of the regions."""
        self._tables = [self._table(region) for region in self._regions]
        self._rows = [self._lies.rows(table) for table in self._tables]

    def _table(self, region: PinnedRegion) -> Tensor:
        """The region as the device sees it, ``[page, H, 2, p, d]``; as the CPU does where it is pageable."""
        if self.device.type != "cuda" or self.pageable_reason:
            return self._lies.table(region.bytes)
        with torch.inference_mode(False):
            seen = torch.as_tensor(CudaArray(region), device=self.device)
        return self._lies.table(seen)

    def _does_not_fit(self, tokens: int, reason: str) -> DoesNotFitError:
        taken = self._lies.nbytes(tokens) * self.geometry.layers
        return DoesNotFitError(
            "There is not enough host memory for the conversation.",
            f"K/V of {self.geometry.round_up(tokens):,} tokens take {units.size(taken, 2)}; {reason}",
            "Shorten the conversation or free memory; what is stored is kept.",
        )


def gather(view: Tensor, index: Tensor) -> Tensor:
    """Rows of a pool's view at ``index [m]`` (int64), on the device of ``index``."""
    return view.index_select(0, index.to(view.device)).to(index.device)


def scatter(view: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write ``rows`` to a pool's view at ``index [m]`` (int64)."""
    view.index_copy_(0, index.to(view.device), rows.to(view.device))
