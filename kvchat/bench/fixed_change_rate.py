"""Speculative mode whose selection changes by a fixed share at every step: random weights change nearly all of it.

Tokens or pages are scored and chosen at the usual cost; then the choice is replaced by a window that slides over all
candidates in random order, from a different start for each KV head. It is computed from the position on the device, so
a CUDA graph can contain it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.modes.speculative import Speculative
from kvchat.kv.ops.selection import Candidates

if TYPE_CHECKING:
    from kvchat.kv.state import KVState


class Window:
    """Of ``slots`` items of each KV head, ``round(rate * slots)`` are others at each position.

    Raises:
        UsageError: there are too few items from ``first`` to ``end`` for the rate.
    """

    def __init__(self, rate: float, slots: int, first: int, end: int, heads: int, device: torch.device) -> None:
        changed = round(rate * slots)
        if end - first < slots + changed:
            raise UsageError(
                f"A change rate of {rate:g} needs a longer context or a smaller budget.",
                f"{slots} are selected per head, {changed} of them new; {max(0, end - first)} are stored.",
                "Take a longer --context, a smaller budget or a smaller change rate.",
            )
        draw = torch.Generator().manual_seed(0)
        self._order = (torch.randperm(end - first, generator=draw) + first).to(device)
        self._changed = torch.tensor(changed, device=device)
        self._slot = torch.arange(slots, device=device)
        self._begins = (torch.arange(heads, device=device) * (len(self._order) // heads))[:, None]

    def at(self, position: Tensor) -> Tensor:
        """Return the item of each slot at ``position`` (0-d), ``[H, slots]``; one that stays keeps its slot."""
        begin = position * self._changed
        place = begin + (self._slot - begin) % max(1, len(self._slot))
        return self._order[(self._begins + place) % len(self._order)]

    @property
    def buffers(self) -> list[Tensor]:
        """What a graph reads."""
        return [self._order, self._changed, self._slot, self._begins]


class FixedTokens(Speculative):
    """Of the k tokens of every layer and KV head on a GPU, ``round(rate * k)`` are others at each step."""

    def __init__(self, rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits) -> None:
        super().__init__(parameters, geometry, traits)
        self.rate = rate

    def attach(self, state: KVState) -> None:
        super().attach(state)
        k, page = min(self.k, self.slots.offset), self.geometry.page
        end = min(state.total - self.window, state.total // page * page)
        self._sliding = Window(self.rate, k, self.sink, end, self.geometry.kv_heads, state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), *self._sliding.buffers]

    def fill(self, fresh: bool) -> None:
        self._chosen_now = self._sliding.at(self.state.position)
        super().fill(fresh)

    def forward_begin(self, position: Tensor) -> None:
        self._chosen_now = self._sliding.at(position)
        super().forward_begin(position)

    def choose(self, layer: int, query: Tensor, hidden: Tensor, held: Tensor) -> Tensor:
        super().choose(layer, query, hidden, held)
        return self._chosen_now.clone()


class FixedPages(FreeKV):
    """Of the k pages of every layer and KV head, ``round(rate * k)`` are others at each step."""

    def __init__(self, rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits) -> None:
        super().__init__(parameters.of_pages(), geometry, traits)
        self.rate = rate

    def attach(self, state: KVState) -> None:
        super().attach(state)
        p, pages = self.geometry.page, self.slots.layout.pages
        first, end = -(-self.sink // p), (state.total - self.window) // p
        self._sliding = Window(self.rate, pages, first, end, self.geometry.kv_heads, state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), *self._sliding.buffers]

    def fill(self, fresh: bool) -> None:
        self._chosen_now = self._chosen_next = self._sliding.at(self.state.position)
        super().fill(fresh)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._chosen_now, self._chosen_next = self._sliding.at(position), self._sliding.at(position + 1)

    def choose(self, layer: int, scores: Tensor, candidates: Candidates, flagged: Tensor | None = None) -> Tensor:
        chosen = super().choose(layer, scores, candidates, flagged)
        if flagged is None:  # with tau > 1 nothing is chosen ahead
            return (self._chosen_now if self.tau > 1 else self._chosen_next).to(chosen.dtype)
        return torch.where(flagged[:, None], self._chosen_now, self.slots.pages_of(layer)).to(chosen.dtype)


def fixed_change_rate(
    rate: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits
) -> Speculative | FreeKV:
    """Speculative mode with this share of its selection new at each step; on a CPU tokens are read in place."""
    by_tokens = parameters.unit == "token" and not geometry.unified
    return (FixedTokens if by_tokens else FixedPages)(rate, parameters, geometry, traits)
