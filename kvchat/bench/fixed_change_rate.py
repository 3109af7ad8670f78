"""FreeKV whose selection changes by a fixed share of pages at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.ops.selection import Candidates

if TYPE_CHECKING:
    from kvchat.kv.state import KVState


class FixedChangeRate(FreeKV):
    """Of the k pages of every layer and KV head, ``round(rate * k)`` are others at each step.

    Pages are scored and selected at the usual cost; then the selection is replaced by a window of k pages that slides
    over all candidates in random order, from a different start for each KV head. The window is computed from the
    position on the device, so a CUDA graph can contain it.
    """

    def __init__(self, rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits) -> None:
        super().__init__(parameters.of_pages(), geometry, traits)
        self.rate = rate

    def attach(self, state: KVState) -> None:
        """Attach to the state and draw the order of the pages.

        Raises:
            UsageError: fewer pages are stored than the rate needs.
        """
        super().attach(state)
        p, k = self.geometry.page, self.slots.layout.pages
        first, end = -(-self.sink // p), (state.total - self.window) // p
        changed = round(self.rate * k)
        if end - first < k + changed:
            raise UsageError(
                f"A change rate of {self.rate:g} needs a longer context or a smaller budget.",
                f"{k} pages are selected per head, {changed} of them new; {max(0, end - first)} are stored.",
                "Take a longer --context, a smaller budget or a smaller change rate.",
            )
        draw = torch.Generator().manual_seed(0)
        self._order = (torch.randperm(end - first, generator=draw) + first).to(state.device)
        self._changed = torch.tensor(changed, device=state.device)
        self._slot = torch.arange(k, device=state.device)
        heads = torch.arange(self.geometry.kv_heads, device=state.device)
        self._begins = (heads * (len(self._order) // self.geometry.kv_heads))[:, None]

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self._order, self._changed, self._slot, self._begins]

    def fill(self, fresh: bool) -> None:
        self._pages_now = self._pages_next = self._pages_at(self.state.position)
        super().fill(fresh)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._pages_now, self._pages_next = self._pages_at(position), self._pages_at(position + 1)

    def choose(self, layer: int, scores: Tensor, candidates: Candidates, flagged: Tensor | None = None) -> Tensor:
        chosen = super().choose(layer, scores, candidates, flagged)
        if flagged is None:  # with tau > 1 nothing is chosen ahead
            return (self._pages_now if self.tau > 1 else self._pages_next).to(chosen.dtype)
        return torch.where(flagged[:, None], self._pages_now, self.slots.pages_of(layer)).to(chosen.dtype)

    def _pages_at(self, position: Tensor) -> Tensor:
        """Return the page of each slot at ``position``, ``[H, k]``; a page that stays keeps its slot."""
        begin = position * self._changed
        place = begin + (self._slot - begin) % max(1, len(self._slot))
        return self._order[(self._begins + place) % len(self._order)]
