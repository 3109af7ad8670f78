"""raas: reads the whole prompt, and drops the page of the answer that has been unimportant for longest.

Paper: RaaS (arXiv 2502.11147), as remembered from it and its reviews. All tokens of the prompt are kept. Each page of
the answer has the time at which it last mattered: in every step, the upper half of the kept pages by Quest's bound (see
quest) gets the current time. If a new page exceeds the budget, the page with the oldest time is dropped for good.

Departures:
    * The budget counts only pages of the answer, and the prompt is read in full, however long. (The paper reads long
      prompts by Quest's rule.) Everything stored when a turn begins counts as prompt, so the next turn reads all of it
      again; likewise if the mode is entered, tokens are withdrawn or other messages are pinned during an answer.
    * Half is the paper's r = 50 %; its other rule, a threshold for the estimated weight, is left out.
    * Pages have 32 tokens (the paper: 16). The page in which a prompt ends belongs to the prompt; the page being filled
      always matters. Of pages with the same time, the first is dropped.
    * All query heads of a KV head share one choice, by the group's maximum score (as in FreeKV).
    * It saves no memory (``kept``).

Shapes: tables ``[layers, H, n]``, bounds ``[layers, H, page, 2 * d_k]``, times ``[layers, H, page]``.
Costs: a step scores all pages; it reads as many slots as in full mode, some of them masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.config.modes import RaaSParameters
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes.base import ModeReport, Plan, Step
from kvchat.kv.modes.comparison.kept import KeptMode
from kvchat.kv.modes.page_index import PageBounds
from kvchat.kv.state import KVState

NEVER = 2**62  # later than any step
HALVES = 2  # pages are ranked; those in the upper half matter


class RaaS(KeptMode):
    """Reads the prompt, and the pages of the answer that mattered most recently."""

    parameters: RaaSParameters

    def _set_up(self) -> None:
        self.pages = max(1, self.parameters.budget // self.geometry.page)
        self.first = 0

    def plan(self, capacity: int) -> Plan:
        plan, g = super().plan(capacity), self.geometry
        bounds = PageBounds(g, torch.device("meta")).page_bytes
        times = g.layers * g.kv_heads * torch.int64.itemsize
        return Plan(plan.layouts, g.pages(capacity) * (bounds + times) + torch.int64.itemsize)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self.index = PageBounds(self.geometry, state.device)
        self.times = torch.zeros((*self.index.data.shape[:3],), dtype=torch.int64, device=state.device)
        self.first_decoded = torch.zeros((), dtype=torch.int64, device=state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self.index.data, self.times, self.first_decoded]

    def kept(self, layer: int) -> Tensor:
        return torch.ones((1, self.state.total), dtype=torch.bool, device=self.state.device)

    def prefilled(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        self.index.compute(layer, start, keys)

    def fill(self, fresh: bool) -> None:
        super().fill(fresh)
        self.first = self.geometry.pages(self.state.total)
        self.first_decoded.fill_(self.first)
        self.index.refresh(self.state.host)
        self._grow()
        self.times.zero_()

    def prepare_step(self) -> Step:
        self.index.follow(self.state.host)
        self._grow()
        return Step(exact=self._decoded() <= self.pages)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        g, times, position = self.geometry, self.times[layer], self.state.position
        tiles = self.slots.table_of(layer).view(g.kv_heads, -1, g.page)
        number = torch.arange(tiles.shape[1], device=position.device)
        is_newest = number == torch.div(position, g.page, rounding_mode="floor")
        held = (tiles[:, :, 0] >= 0) & (number >= self.first_decoded)
        oldest = times.masked_fill(~held | is_newest, NEVER).argmin(-1, keepdim=True)
        goes = (held.sum(-1, keepdim=True) > self.pages) & (number == oldest) & ~is_newest & held
        tiles.masked_fill_(goes.unsqueeze(-1), EMPTY)
        full = held & ~goes & ~is_newest
        bounds = self.index.scores(self.state.ops, layer, query, self.state.scaling(layer)).amax(1)
        ranks = bounds[:, : len(number)].masked_fill(~full, -torch.inf).argsort(-1, descending=True).argsort(-1)
        matters = full & (HALVES * ranks < full.sum(-1, keepdim=True))
        times.copy_(torch.where(matters | is_newest, position, times))
        return False

    def report(self) -> ModeReport:
        pages = self._decoded()
        stats = {"answer pages": min(pages, self.pages), "dropped pages": max(0, pages - self.pages)}
        return ModeReport(self.parameters.model_dump(), stats)

    def _decoded(self) -> int:
        """Return the number of pages that began after the prompt, including the next token's."""
        return self.state.total // self.geometry.page + 1 - self.first

    def _grow(self) -> None:
        """Extend bounds and times to all slots."""
        pages = self.slots.n // self.geometry.page
        self.index.reserve(self.slots.n)
        if (more := pages - self.times.shape[2]) > 0:
            self.times = torch.nn.functional.pad(self.times, (0, more))
