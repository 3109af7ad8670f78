"""Summaries of every page by which tokens are chosen, and the base of the modes that choose so.

A summary of a page's keys, per layer and KV head, is bounds or codes of a few bits. It follows the host pool by whole
pages: the candidates of a step are full pages, or tokens in them.

There is no second level, such as bounds of 128 tokens that leave a quarter of the pages to the codes. By computation
(``engine/cards.py``) reading all codes takes 5.6 of the 27.0 ms of an 8B's token in 4 bits after 131,072 tokens on an
RTX 3060, 0.6 of 3.7 ms on an H100. Two levels would save two thirds of that, 11 to 14 % of the token; with 16-bit
weights, or after 65,536 tokens, 6 to 8 %. But a second choice would come before the first, and what choosing took on an
H200 was not reading (0.09 of 1.6 ms); coarse bounds also lose tokens before any code is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvchat.config.modes import BudgetParameters
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.pinned import use_huge_pages
from kvchat.kv.modes.base import Mode, Plan, Step, everything, refuse_small_budget
from kvchat.kv.ops import key_codes
from kvchat.kv.ops.selection import page_bounds
from kvchat.kv.state import KVState

BLOCK = 8  # tokens of a block of ``index=blocks``
# Pages summarized at once. Layer by layer, 30 layers took twice as long; and intermediate results are eight times a
# page's keys in 16 bits: for 128K tokens at once gigabytes.
TOGETHER, MOST = 64, 512
BLOCK_SHARE = 0.25  # of the way from a block's mean key to its bounds


class PageIndex:
    """One row ``width`` long for each page, ``data [layers, H, page, width]``, of the layers ``first`` to the last.

    It covers the first ``tokens`` tokens. The operations of ``state``, where it is given, make the rows.
    """

    state: KVState | None = None

    dtype: torch.dtype
    width: int
    empty: float = 0
    of_values: ClassVar = False  # rows are made of the tokens' values, not of their keys

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0) -> None:
        self.geometry = geometry
        self.first = first
        self.tokens = 0
        shape = (geometry.layers - first, geometry.kv_heads, 0, self.width)
        self.data = torch.empty(shape, dtype=self.dtype, device=device)

    @property
    def pages(self) -> int:
        return self.data.shape[2]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers and heads."""
        return self.data.shape[0] * self.geometry.kv_heads * self.width * self.dtype.itemsize

    def summary(self, rows: Tensor, pages: int) -> Tensor:
        """The rows ``[H, pages, width]`` of keys or values ``[H, n, d]``; the last page may be partly filled."""
        raise NotImplementedError

    def reserve(self, tokens: int) -> None:
        """Make room for the pages of ``tokens``; new ones are empty."""
        if tokens <= self.pages * self.geometry.page:
            return
        shape = (*self.data.shape[:2], self.geometry.pages(tokens), self.width)
        data = torch.empty(shape, dtype=self.dtype, device=self.data.device)
        use_huge_pages(data)
        data[:, :, : self.pages], data[:, :, self.pages :] = self.data, self.empty
        self.data = data

    def of(self, layer: int) -> Tensor:
        """``[H, page, width]``"""
        return self.data[layer - self.first]

    def follow(self, host: HostPool) -> None:
        """Cover the pages that have become full since; others need no rows yet."""
        if host.total // self.geometry.page > self.tokens // self.geometry.page:
            self.refresh(host)

    def refresh(self, host: HostPool) -> None:
        """Cover exactly what the host pool holds; only pages that are not covered yet are read from it."""
        g = self.geometry
        begin, end = min(self.tokens, host.total) // g.page, g.pages(host.total)
        self.reserve(g.grown(host.total))
        self.data[:, :, begin:] = self.empty
        self.tokens = host.total
        for start in range(begin, end, MOST):
            self._read(host, start, min(start + MOST, end))

    def _read(self, host: HostPool, begin: int, end: int) -> None:
        """Cover the pages from ``begin`` up to ``end``, at least one."""
        g, tokens = self.geometry, min(host.total, end * self.geometry.page)
        together = max(1, TOGETHER // (end - begin))
        for first in range(self.first, g.layers, together):
            layers = range(first, min(first + together, g.layers))
            parts = [host.dense(layer, tokens, begin)[self.of_values] for layer in layers]
            stored = torch.cat(parts) if len(parts) > 1 else parts[0]  # of many pages a copy is large
            rows = self.summary(stored, end - begin).view(len(layers), g.kv_heads, end - begin, self.width)
            self.data[first - self.first : layers.stop - self.first, :, begin:end] = rows

    def compute(self, layer: int, start: int, rows: Tensor) -> None:
        """Cover a layer's tokens from ``start`` on, given keys or values ``[H, n, d]`` of all tokens in a prefill.

        ``tokens`` advances only after the last layer. ``refresh`` then re-reads at most one page, and clears what a
        failed forward left.
        """
        g = self.geometry
        if start // g.page > self.tokens // g.page:
            return
        begin, end = start // g.page, g.pages(rows.shape[1])
        self.reserve(g.grown(rows.shape[1]))
        self.of(layer)[:, begin:end] = self.summary(rows[:, begin * g.page :], end - begin)
        if layer == g.layers - 1:
            self.tokens = rows.shape[1]


class PageBounds(PageIndex):
    """Element-wise minimum and maximum of the keys of a page, or of its blocks of ``BLOCK`` tokens.

    Stored as ``[max | -min]`` so that Quest's bound is one dot product: ``sum_i max(q_i * max_i, q_i * min_i) =
    relu(q) . max + relu(-q) . (-min)``. Of blocks, a quarter of the way from the mean key to these bounds: in the same
    form its dot product is the mean's plus a quarter of what the bound is above it.
    """

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0, in_blocks: bool = False) -> None:
        self.in_blocks = in_blocks
        self.blocks = -(-geometry.page // BLOCK) if in_blocks else 1
        self.dtype = geometry.dtype
        self.width = self.blocks * 2 * geometry.d_k
        # Not -inf: relu(q) = 0 times it would be NaN.
        self.empty = torch.finfo(geometry.dtype).min
        super().__init__(geometry, device, first)

    def summary(self, keys: Tensor, pages: int) -> Tensor:
        page = self.geometry.page
        if not self.in_blocks:
            return page_bounds(keys, pages, page)
        both = torch.cat((keys, -keys), -1)
        padded = torch.nn.functional.pad(both, (0, 0, 0, pages * page - both.shape[1]), value=self.empty)
        tiles = padded.view(len(keys), pages, page, -1)
        parts = [tiles[:, :, at : at + BLOCK] for at in range(0, page, BLOCK)]
        # A block that is partly filled, in the newest page, is no candidate's yet.
        rows = [torch.lerp(part.float().mean(2), part.float().amax(2), BLOCK_SHARE) for part in parts]
        return torch.stack(rows, 2).clamp(min=self.empty).flatten(2).to(self.dtype)

    def scores(self, ops: Any, layer: int, query: Tensor, scaling: float) -> Tensor:
        """The pages' scores ``[H, G, page]`` for ``query [H_q, d_k]``: of blocks the highest."""
        if self.blocks == 1:
            scores: Tensor = ops.page_scores(query, self.of(layer), scaling)
            return scores
        rows = self.of(layer).view(self.geometry.kv_heads, -1, self.width // self.blocks)
        of_blocks: Tensor = ops.page_scores(query, rows, scaling)
        return of_blocks.view(*of_blocks.shape[:2], -1, self.blocks).amax(-1)


class KeyCodes(PageIndex):
    """The keys in ``bits`` bits (``ops.key_codes``)."""

    dtype = torch.int32

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0, bits: int = 2) -> None:
        self.bits = bits
        self.width = key_codes.words_of(geometry.d_k, geometry.page, bits)
        super().__init__(geometry, device, first)

    def summary(self, keys: Tensor, pages: int) -> Tensor:
        if self.state:
            return self.state.ops.encode_keys(keys, self.bits)
        return key_codes.encode(keys, self.geometry.page, self.bits)

    def scores(self, ops: Any, layer: int, query: Tensor, scaling: float) -> Tensor:
        """The logarithms of the pages' mass ``[H, G, page]`` for ``query [H_q, d_k]``."""
        scores: Tensor = ops.token_scores(query, self.of(layer), self.bits, scaling)
        return scores.view(*scores.shape[:2], -1, self.geometry.page).logsumexp(-1)


class ValueMeans(PageIndex):
    """The mean value of each page, in 16 bits: 1.6 % of the K/V in 16 bits."""

    of_values = True

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0) -> None:
        self.dtype, self.width = key_codes.edge_dtype(geometry.dtype), geometry.d_v
        super().__init__(geometry, device, first)

    def summary(self, rows: Tensor, pages: int) -> Tensor:
        (heads, tokens, d_v), page = rows.shape, self.geometry.page
        whole = tokens // page  # one that is partly filled is read
        means = rows[:, : whole * page].reshape(heads, whole, page, d_v).mean(2, dtype=torch.float32)
        return torch.nn.functional.pad(means, (0, 0, 0, pages - whole)).to(self.dtype)


class IndexedMode(Mode):
    """Sinks, a window and what an index of the stored keys chooses; the first layer may be read in full.

    ``summaries`` are the index and whatever else is kept of every page; ``first`` is the first layer that chooses.
    """

    recovery_levels = ("WR", "FR", "RR")
    widens = True
    parameters: BudgetParameters
    index: PageIndex
    first: int
    k: int
    summaries: Sequence[PageIndex]

    def _share_out(self, budget: int, sink: int, window: int, first_full: bool) -> None:
        """Set ``budget``, and ``sink`` and ``window``, which are parts of it.

        Raises:
            UsageError: they do not fit, or the window is no page; DoesNotFitError: the model has one layer, read whole.
        """
        page = self.geometry.page
        refuse_small_budget(self.name, budget, sink, window)
        if window < page:
            raise UsageError(
                "The speculative window is too small.",
                f"window = {window} is less than one page of {page} tokens.",
                f"Use a window of at least {page}.",
            )
        self.budget, self.sink, self.window = budget, sink, window
        self.first = 1 if first_full else 0
        if self.geometry.layers == self.first:
            raise DoesNotFitError(
                "Speculative retrieval needs a second layer.", "The model has one.", "Set first_full=false."
            )

    def _new_index(self, device: torch.device) -> PageIndex:
        raise NotImplementedError

    def _new_summaries(self, device: torch.device) -> Sequence[PageIndex]:
        """The empty index, then whatever else is kept of every page."""
        return [self._new_index(device)]

    def plan(self, capacity: int) -> Plan:
        return self._planned(self._layout(capacity, min(self.k, self.geometry.pages(capacity))), capacity)

    def _layout(self, capacity: int, pages: int) -> Layout:
        """Slots for sinks, a window, so many ``pages`` and pinned messages, no more than ``capacity`` tokens fill."""
        g = self.geometry
        window, sink = min(self.window, max(capacity, g.page)), min(self.sink, capacity)
        return Layout(self.first, g.layers, sink, window, pages, shared=False, pinned=len(self.pins))

    def _planned(self, rest: Layout, capacity: int) -> Plan:
        """With ``rest`` for the layers that choose."""
        full = [everything(self.geometry, self.first, capacity)] if self.first else []
        page_bytes = sum(each.page_bytes for each in self._new_summaries(torch.device("meta")))
        return Plan([*full, rest], self.geometry.pages(capacity) * page_bytes)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), *(each.data for each in self.summaries)]

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self.summaries = self._new_summaries(state.device)
        for each in self.summaries:
            each.state = state
        self.index = self.summaries[0]

    def prefilled(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        if layer >= self.first:
            for each in self.summaries:
                each.compute(layer, start, values if each.of_values else keys)

    def fill(self, fresh: bool) -> None:
        super().fill(fresh)
        for each in self.summaries:
            each.refresh(self.state.host)

    def prepare_step(self) -> Step:
        # As much as the slots have: on a GPU both growing at once costs one new graph, not two.
        for each in self.summaries:
            each.reserve(self.state.capacity)
        return super().prepare_step()
