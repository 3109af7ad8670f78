"""Summaries of pages by which tokens or pages are chosen, and the base of the modes that use them.

Per layer and KV head, a summary is the bounds of a page's keys or their codes of a few bits. The candidates of a step
are full pages, or tokens in them.

There is no second level, such as bounds of 128 tokens that leave a quarter of the pages to the codes. Computed
(``engine/cards.py``): reading all codes takes 5.6 of the 27.0 ms of an 8B's token in 4 bits after 131,072 tokens on an
RTX 3060, and 0.6 of 3.7 ms on an H100. Two levels would save two thirds of that, 11 to 14 % of the token; with 16-bit
weights, or after 65,536 tokens, 6 to 8 %. But they add another choice, while reading is only a small part of the time
for choosing (0.09 of 1.6 ms on an H200), and coarse bounds lose tokens before any code is read.
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

BLOCK = 8  # tokens per block of ``index=blocks``
# TOGETHER pages of several layers are summarized in one go: one layer at a time took twice as long for 30 layers. MOST
# limits intermediate results, which are eight times as large as keys in 16 bits: gigabytes for 128K tokens.
TOGETHER, MOST = 64, 512
BLOCK_SHARE = 0.25  # position of a block's row between its mean key (0) and its bounds (1)


class PageIndex:
    """One row of ``width`` elements per page, ``data [layers, H, page, width]``, for the layers from ``first`` on.

    It covers the first ``tokens`` tokens. If ``state`` is set, its operations compute the rows.
    """

    state: KVState | None = None

    dtype: torch.dtype
    width: int
    empty: float = 0
    of_values: ClassVar = False  # whether rows summarize values instead of keys

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
        """Bytes of one page over all layers and heads."""
        return self.data.shape[0] * self.geometry.kv_heads * self.width * self.dtype.itemsize

    def summary(self, rows: Tensor, pages: int) -> Tensor:
        """Return the rows ``[H, pages, width]`` of keys or values ``[H, n, d]``; the last page may be partly filled."""
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
        """Add the pages that became full since the last call; others need no rows yet."""
        if host.total // self.geometry.page > self.tokens // self.geometry.page:
            self.refresh(host)

    def refresh(self, host: HostPool) -> None:
        """Cover exactly the tokens in the host pool; read only pages that are not covered yet."""
        g = self.geometry
        begin, end = min(self.tokens, host.total) // g.page, g.pages(host.total)
        self.reserve(g.grown(host.total))
        self.data[:, :, begin:] = self.empty
        self.tokens = host.total
        for start in range(begin, end, MOST):
            self._read(host, start, min(start + MOST, end))

    def _read(self, host: HostPool, begin: int, end: int) -> None:
        """Add the pages from ``begin`` up to ``end``, at least one."""
        g, tokens = self.geometry, min(host.total, end * self.geometry.page)
        together = max(1, TOGETHER // (end - begin))
        for first in range(self.first, g.layers, together):
            layers = range(first, min(first + together, g.layers))
            parts = [host.dense(layer, tokens, begin)[self.of_values] for layer in layers]
            stored = torch.cat(parts) if len(parts) > 1 else parts[0]  # a copy of many pages would be large
            rows = self.summary(stored, end - begin).view(len(layers), g.kv_heads, end - begin, self.width)
            self.data[first - self.first : layers.stop - self.first, :, begin:end] = rows

    def compute(self, layer: int, start: int, rows: Tensor) -> None:
        """Add a layer's tokens from ``start`` on, given the keys or values ``[H, n, d]`` of all tokens in a prefill.

        ``tokens`` advances only after the last layer. ``refresh`` then rereads at most one page, and clears
        what a failed forward left.
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

    They are stored as ``[max | -min]`` so that Quest's bound is one dot product: ``sum_i max(q_i * max_i, q_i * min_i)
    = relu(q) . max + relu(-q) . (-min)``. For blocks, rows are a quarter of the way from the mean key to these bounds,
    in the same form; the dot product is then a quarter of the way from the mean key's to the bound.
    """

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0, in_blocks: bool = False) -> None:
        self.in_blocks = in_blocks
        self.blocks = -(-geometry.page // BLOCK) if in_blocks else 1
        self.dtype = geometry.dtype
        self.width = self.blocks * 2 * geometry.d_k
        # Not -inf, because relu(q) = 0 times -inf is NaN.
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
        # A partly filled block may have a wrong mean, because the newest page is not a candidate yet.
        rows = [torch.lerp(part.float().mean(2), part.float().amax(2), BLOCK_SHARE) for part in parts]
        return torch.stack(rows, 2).clamp(min=self.empty).flatten(2).to(self.dtype)

    def scores(self, ops: Any, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Return the pages' scores ``[H, G, page]`` for ``query [H_q, d_k]``; with blocks, those of the best block."""
        if self.blocks == 1:
            scores: Tensor = ops.page_scores(query, self.of(layer), scaling)
            return scores
        rows = self.of(layer).view(self.geometry.kv_heads, -1, self.width // self.blocks)
        of_blocks: Tensor = ops.page_scores(query, rows, scaling)
        return of_blocks.view(*of_blocks.shape[:2], -1, self.blocks).amax(-1)


class KeyCodes(PageIndex):
    """The keys, encoded in ``bits`` bits (``ops.key_codes``)."""

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
        """Return the log-sum-exp of each page's token scores ``[H, G, page]`` for ``query [H_q, d_k]``."""
        scores: Tensor = ops.token_scores(query, self.of(layer), self.bits, scaling)
        return scores.view(*scores.shape[:2], -1, self.geometry.page).logsumexp(-1)


class ValueMeans(PageIndex):
    """The mean value of each page, in 16 bits (1.6 % of 16-bit K/V)."""

    of_values = True

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0) -> None:
        self.dtype, self.width = key_codes.edge_dtype(geometry.dtype), geometry.d_v
        super().__init__(geometry, device, first)

    def summary(self, rows: Tensor, pages: int) -> Tensor:
        (heads, tokens, d_v), page = rows.shape, self.geometry.page
        whole = tokens // page  # a partly filled page is always read
        means = rows[:, : whole * page].reshape(heads, whole, page, d_v).mean(2, dtype=torch.float32)
        return torch.nn.functional.pad(means, (0, 0, 0, pages - whole)).to(self.dtype)


class IndexedMode(Mode):
    """Reads sinks, a window and what an index of the stored keys chooses; the first layer may be read in full.

    ``summaries`` has the index and any other summary of every page; ``first`` is the first layer that chooses.
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
            UsageError: they do not fit, or the window is less than a page; DoesNotFitError: no layer could choose.
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
        """Create the empty index, followed by any other summaries of every page."""
        return [self._new_index(device)]

    def plan(self, capacity: int) -> Plan:
        return self._planned(self._layout(capacity, min(self.k, self.geometry.pages(capacity))), capacity)

    def _layout(self, capacity: int, pages: int) -> Layout:
        """Return the layout with sinks, a window, ``pages`` and pinned messages, limited to ``capacity`` tokens."""
        g = self.geometry
        window, sink = min(self.window, max(capacity, g.page)), min(self.sink, capacity)
        return Layout(self.first, g.layers, sink, window, pages, shared=False, pinned=len(self.pins))

    def _planned(self, rest: Layout, capacity: int) -> Plan:
        """Return the plan with the layout ``rest`` for the layers that choose."""
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
        # The same capacity as the slots: on a GPU, growing both together costs one new graph instead of two.
        for each in self.summaries:
            each.reserve(self.state.capacity)
        return super().prepare_step()
