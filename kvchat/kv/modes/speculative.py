"""speculative: pages retrieved one step ahead, corrected per head where the query turned.

Paper: FreeKV (speculative retrieval, fine-grained correction; sections 3.2-3.3). Step i attends to sinks, window and
the k = (budget - sink - window) / p pages chosen with the query of step i-1; after its attention the pages for step i+1
are chosen with q_i and what is missing is recalled. Before attention, a KV head whose C = mean over its group of
cos(q_i, q_{i-1}) is below tau gets the pages of q_i at once.

Departures and decisions:
    * The window is exact (the last W tokens, a ring), not whole pages: a page that the window is leaving is a candidate
      from its first token on, and of a resident page only tokens outside sinks and window are read. So a token attends
      to at most ``budget`` tokens, to none twice, and no page is missing for a step (candidates for position i+1).
    * Scores are scaled by the layer's attention scale (``selection.page_scores``).
    * The window holds at least one page, so that candidates are always complete.

Shapes: per layer tables ``[H, k*p + S + W]``; bounds ``[layers, H, page, 2*d_k]``. The first layer is full by default.
Costs: a step scores all pages (2*d_k elements a page and head), and recalls only (page, head) blocks that changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.attention import Weights
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.modes.base import Mode, ModelTraits, budget_of, refuse_small_budget
from kvchat.kv.modes.page_bounds import PageBounds
from kvchat.kv.ops.selection import Candidates

if TYPE_CHECKING:
    from kvchat.kv.manager import Store


class Speculative(Mode):
    """Sinks, a window and k retrieved pages per layer and KV head."""

    name = "speculative"
    recoveries = ("WR", "FR", "RR")
    widens = True
    parameters: SpeculativeParameters

    def __init__(
        self, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits, preamble: int = 0
    ) -> None:
        super().__init__(parameters, geometry, traits, preamble)
        p = geometry.page
        self.budget = budget_of(parameters, traits.context)
        quarter = max(p, self.budget // 4 // p * p)
        self.sink = min(quarter, self.budget - p) if parameters.sink is None else parameters.sink
        self.window = quarter if parameters.window is None else parameters.window
        refuse_small_budget(self.name, self.budget, self.sink, self.window)
        if self.window < p:
            raise UsageError(
                "The speculative window is too small.", f"window = {self.window}, at least one page = {p} tokens."
            )
        self.k = (self.budget - self.sink - self.window) // p
        self.first = 1 if parameters.first_full else 0
        if geometry.layers == self.first:
            raise DoesNotFitError(
                "Speculative retrieval needs a second layer.", "The model has one.", "Set first_full=false."
            )

    def layouts(self, capacity: int) -> list[Layout]:
        full = [Layout(0, self.first, sink=0, window=capacity)] if self.first else []
        window = min(self.window, max(capacity, self.geometry.page))
        pages = min(self.k, self.geometry.pages(capacity))
        rest = Layout(self.first, self.geometry.layers, min(self.sink, capacity), window, pages, shared=False)
        return [*full, rest]

    def nbytes(self, capacity: int) -> int:
        g = self.geometry
        per_page = (g.layers - self.first) * g.kv_heads * 2 * g.d_k * g.dtype.itemsize
        return super().nbytes(capacity) + g.pages(capacity) * per_page

    @property
    def device_bytes(self) -> int:
        return self.bounds.nbytes

    def buffers(self) -> list[Tensor]:
        return [self.bounds.data]

    @property
    def slots(self) -> DeviceSlots:
        """Those of the layers that retrieve."""
        return self.store.slots[-1]

    def attach(self, store: Store) -> None:
        super().attach(store)
        self.bounds = PageBounds(self.geometry, store.device, self.first)

    def prefilled(self, layer: int, start: int, keys: Tensor) -> None:
        if layer >= self.first:
            self.bounds.compute(layer, start, keys)

    def fill(self, num_reachable: int) -> None:
        super().fill(num_reachable)
        self.bounds.refresh(self.store.host)
        if not self.k:
            return
        position = self.store.position
        candidates = self._candidates(position)
        for layer in range(self.first, self.geometry.layers):
            self._recall(layer, self.choose(layer, self._scores(layer, self.store.query[layer]), candidates))
        self._open(slice(None), position - self.window)

    def advance(self) -> None:
        # As much as the slots have: on a GPU both growing at once costs one new graph, not two.
        self.bounds.reserve(self.store.capacity)
        self.bounds.tokens = self.store.total + 1

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._page = torch.div(position, self.geometry.page, rounding_mode="floor").view(1)
        self._now, self._next = self._candidates(position), self._candidates(position + 1)
        self._oldest = position - self.window
        self._flags: list[Tensor] = []

    def attention_begin(self, layer: int, query: Tensor, key: Tensor, spec: AttentionSpec) -> None:
        if layer < self.first:
            return
        self.store.ops.update_bounds(self.bounds, layer, self._page, key)
        if self.k:
            self._score = self._correct(layer, query) if self.parameters.tau > -1 else None

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        # With tau > 1 every head is corrected at every step: what is speculated would never be read.
        if layer >= self.first and self.k and self.parameters.tau <= 1:
            with self.store.transfer.side_stream(query if self._score is None else self._score):
                scores = self._scores(layer, query) if self._score is None else self._score
                self._recall(layer, self.choose(layer, scores, self._next))

    def forward_end(self, position: Tensor) -> None:
        if self.k:
            self._open(slice(None), self._oldest + 1)
        if self._flags:
            self.store.transfer.counters[0, 2].add_(torch.cat(self._flags).sum())

    def stats(self) -> dict[str, Any]:
        return {"pages per head": self.k, "candidate pages": self._candidate_pages(self.store.total + 1)}

    def is_exact(self, tokens: int) -> bool:
        return self._candidate_pages(tokens) <= self.k

    def effective_params(self) -> dict[str, Any]:
        return self.parameters.model_dump() | {"budget": self.budget, "sink": self.sink, "window": self.window}

    def _scores(self, layer: int, query: Tensor) -> Tensor:
        return self.store.ops.page_scores(query, self.bounds.of(layer), self.store.scaling(layer))

    def choose(self, layer: int, scores: Tensor, candidates: Candidates, flagged: Tensor | None = None) -> Tensor:
        """The pages that the layer's page slots are to hold, ``[H, k]``; only ``flagged`` heads may change theirs."""
        return self.store.ops.choose(scores, candidates, self.slots.pages_of(layer), flagged)

    def _correct(self, layer: int, query: Tensor) -> Tensor:
        """Recall now, for the heads whose query turned; the pages' scores."""
        ops = self.store.ops
        flagged = ops.needs_correction(query, self.store.query[layer], self.parameters.tau)
        self._flags.append(flagged)
        scores = self._scores(layer, query)
        self._recall(layer, self.choose(layer, scores, self._now, flagged))
        index = layer - self.first
        self._open(slice(index, index + 1), self._oldest)
        return scores

    def _candidates(self, position: Tensor) -> Candidates:
        """The pages with a token between sinks and window at the step at ``position``."""
        p = self.geometry.page
        last = torch.div(position - self.window, p, rounding_mode="floor")
        return Candidates.between(self.sink // p, last, self.bounds.pages)

    def _recall(self, layer: int, placed: Tensor) -> None:
        self.store.transfer.load_pages(self.slots, layer, placed, self.slots.pages_of(layer))

    def _open(self, layers: slice, last: Tensor) -> None:
        self.store.ops.open_pages(self.slots, layers, self.sink, last)

    def _candidate_pages(self, tokens: int) -> int:
        """Pages with a token between sinks and window when ``tokens`` are stored, the newest included."""
        p = self.geometry.page
        return max(0, (tokens - 1 - self.window) // p - self.sink // p + 1)
