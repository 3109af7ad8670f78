"""speculative: pages retrieved one step ahead, corrected per head where the query turned.

Paper: FreeKV (speculative retrieval, fine-grained correction; sections 3.2-3.3). Step i attends to sinks, window and
the k = (budget - sink - window) / p pages chosen with the query of step i-1; after its attention the pages for step i+1
are chosen with q_i and what is missing is recalled. Before attention, a KV head whose C = mean over its group of
cos(q_i, q_{i-1}) is below tau gets the pages of q_i at once.

Departures and decisions:
    * The window is exact (the last W tokens, a ring), not whole pages: a page that the window is leaving is a candidate
      from its first token on, and of a resident page only tokens outside sinks and window are read. So a token attends
      to at most ``budget`` tokens, to none twice, and no page is missing for a step (candidates for position i+1).
    * Scores are scaled by the layer's attention scale (``select.page_scores``).
    * The window holds at least one page, so that candidates are always complete.

Shapes: per layer tables ``[H, k*p + S + W]``; digests ``[layers, H, page, 2*d_k]``. The first layer is full by default.
Costs: a step scores all pages (2*d_k elements a page and head), and recalls only (page, head) blocks that changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.digest import Digests
from kvchat.kv.facts import LayerFacts
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import Mode, ModelTraits, budget_of, refuse_small_budget
from kvchat.kv.pool import Layout, Slots
from kvchat.kv.select import page_scores, place, top_pages, turned
from kvchat.parameters import SpeculativeParameters

if TYPE_CHECKING:
    from kvchat.kv.store import Store


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
        return self.digests.nbytes

    @property
    def slots(self) -> Slots:
        """Those of the layers that retrieve."""
        return self.store.slots[-1]

    def attach(self, store: Store) -> None:
        super().attach(store)
        self.digests = Digests(self.geometry, store.device, self.first)

    def fill(self, cached: int) -> None:
        super().fill(cached)
        self.digests.catch_up(self.store.host)
        if not self.k:
            return
        position = torch.tensor(self.store.total, device=self.store.device)
        closed = self._closed(position)
        for layer in range(self.first, self.geometry.layers):
            self._recall(layer, self._choose(self._scores(layer, self.store.query[layer]), closed))
        self._open(slice(None), position)

    def begin_step(self, position: Tensor) -> None:
        self.digests.reserve(self.store.total + 1)
        self.digests.tokens = self.store.total + 1
        super().begin_step(position)
        self._page = torch.div(position, self.geometry.page, rounding_mode="floor").view(1)
        self._closed_now, self._closed_next = self._closed(position), self._closed(position + 1)

    def before(self, layer: int, query: Tensor, facts: LayerFacts) -> None:
        if layer < self.first:
            return
        keys = self.store.new_keys
        self.digests.add(layer, self._page, keys)
        if not self.k:
            return
        self._score = self._scores(layer, query)
        if self.parameters.tau > -1:
            self._correct(layer, query)

    def after(self, layer: int, query: Tensor, weights: list[Tensor], facts: LayerFacts) -> None:
        # With tau > 1 every head is corrected at every step: what is speculated would never be read.
        if layer >= self.first and self.k and self.parameters.tau <= 1:
            self._recall(layer, self._choose(self._score, self._closed_next))

    def end_step(self, position: Tensor) -> None:
        if self.k:
            self._open(slice(None), position + 1)

    def extras(self) -> dict[str, Any]:
        return {"pages per head": self.k, "candidate pages": self._candidates(self.store.total + 1)}

    def covers(self, tokens: int) -> bool:
        return self._candidates(tokens) <= self.k

    def resolved(self) -> dict[str, Any]:
        return self.parameters.model_dump() | {"budget": self.budget, "sink": self.sink, "window": self.window}

    def _correct(self, layer: int, query: Tensor) -> None:
        """Recall now, for the heads whose query turned."""
        flagged = turned(query, self.store.query[layer], self.geometry.kv_heads, self.parameters.tau)
        self.store.recall.counters[2] += flagged.sum()
        chosen = self._choose(self._score, self._closed_now)
        self._recall(layer, torch.where(flagged[:, None], chosen, self.slots.pages_of(layer)))
        index = layer - self.first
        self._open(slice(index, index + 1), self.store.position)

    def _scores(self, layer: int, query: Tensor) -> Tensor:
        return page_scores(query, self.digests.of(layer), self.store.scaling(layer))

    def _choose(self, scores: Tensor, closed: Tensor) -> Tensor:
        """The best pages but those ``closed``, ``[H, k]``."""
        return top_pages(scores, closed, self.slots.layout.pages)

    def _closed(self, position: Tensor) -> Tensor:
        """The pages with no token between sinks and window at the step at ``position``, bool ``[page]``."""
        p = self.geometry.page
        pages = torch.arange(self.digests.pages, device=position.device)
        return (pages < self.sink // p) | (pages * p > position - self.window)

    def _recall(self, layer: int, wanted: Tensor) -> None:
        resident = self.slots.pages_of(layer)
        self.store.recall.pages(self.slots, layer, place(wanted, resident), resident)

    def _open(self, layers: slice, position: Tensor) -> None:
        self.slots.open_pages(layers, self.sink, position - self.window)

    def _candidates(self, tokens: int) -> int:
        """Pages with a token between sinks and window when ``tokens`` are stored, the newest included."""
        p = self.geometry.page
        return max(0, (tokens - 1 - self.window) // p - self.sink // p + 1)
