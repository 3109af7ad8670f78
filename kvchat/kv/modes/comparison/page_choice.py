"""The base of methods that read sinks, the newest pages, and k others chosen by each token's own query.

The newest pages are in a ring and are read in full; a page that leaves the ring becomes a candidate at once. In a layer
with a sliding window, pages outside the window are not candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.config.modes import BudgetParameters
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes.base import ModeReport, Step, budget_of, refuse_small_budget
from kvchat.kv.modes.page_index import IndexedMode
from kvchat.kv.ops.selection import assign_slots, best


def tiles(keys: Tensor, pages: int, page: int) -> Tensor:
    """Return ``keys [H, n, d]`` by page, float32 ``[H, pages, page, d]``; zeros pad the last, not yet used page."""
    padded = torch.nn.functional.pad(keys, (0, 0, 0, pages * page - keys.shape[1]))
    return padded.reshape(len(keys), pages, page, -1).float()


class PageChoice(IndexedMode):
    """Always reads ``sink_pages`` and ``newest_pages``, and the first ``whole_layers`` layers in full."""

    parameters: BudgetParameters
    sink_pages: int = 0
    newest_pages: int = 1
    whole_layers: int = 0

    def _set_up(self) -> None:
        page = self.geometry.page
        self.budget = budget_of(self.parameters, self.traits.context)
        self.sink, self.window = self.sink_pages * page, self.newest_pages * page
        refuse_small_budget(self.name, self.budget, self.sink, self.window)
        self.k = (self.budget - self.sink - self.window) // page
        self.first = min(self.whole_layers, self.geometry.layers - 1)
        self._pin_to_sinks()

    def scores(self, layer: int, query: Tensor, masked: Tensor) -> Tensor:
        """Return the pages' scores ``[H, page]`` for ``query [H_q, d_k]``; -inf for those in ``masked [page]``."""
        raise NotImplementedError

    def wanted(self, layer: int, scores: Tensor, resident: Tensor) -> Tensor:
        """Return the pages ``[H, k]`` to read; ``resident [H, k]`` are on the device."""
        return best(scores, resident.shape[1])

    def fill(self, fresh: bool) -> None:
        super().fill(fresh)
        self._begin(self.state.position)
        for layer in range(self.first, self.geometry.layers):
            self._choose(layer, self.state.query[layer])

    def prepare_step(self) -> Step:
        super().prepare_step()
        self.index.follow(self.state.host)
        return Step(exact=self._candidates() <= self.k)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._begin(position)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        if layer >= self.first:
            self._choose(layer, query)
        return False

    def report(self) -> ModeReport:
        stats = {"pages per head": self.k, "candidate pages": self._candidates()}
        return ModeReport(self.parameters.model_dump() | {"budget": self.budget}, stats)

    def _candidates(self) -> int:
        """Return the number of full pages between sinks and newest pages, for the next token."""
        page = self.geometry.page
        return max(0, self.state.total // page - (self.newest_pages - 1) - self.sink // page)

    def _begin(self, position: Tensor) -> None:
        """Note which pages the token at ``position`` (0-d) may choose; remove older pages from the ring's table."""
        page = self.geometry.page
        newest = torch.div(position, page, rounding_mode="floor") - (self.newest_pages - 1)
        self._position, self._last = position, newest * page - 1
        pages = torch.arange(self.index.pages, device=position.device)
        self._closed = (pages < self.sink // page) | (pages >= newest)
        self._ends = (pages + 1) * page - 1
        ring = self.slots.table[..., self.slots.ring :]
        ring.masked_fill_(ring <= self._last, EMPTY)

    def _choose(self, layer: int, query: Tensor) -> None:
        """Recall the pages that ``query [H_q, d_k]`` chooses for the layer's attention."""
        resident = self.slots.pages_of(layer)
        if not resident.shape[1]:
            return
        masked = self._closed | (self._ends <= self._position - self.state.sight[layer])
        wanted = self.wanted(layer, self.scores(layer, query, masked), resident)
        placed = assign_slots(wanted, resident, len(masked), reuse=True)
        self.state.transfer.load_pages(self.slots, layer, placed, resident)
        at = layer - self.first
        self._open_pages(self.slots, slice(at, at + 1), self._last)
