"""strided: a window of recent tokens, and every ``stride``-th page before it.

Shapes: tables ``[1, H, k * p + window]``, k pages. Costs: a page is recalled whenever one leaves the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.memory.device_slots import EMPTY, Layout
from kvchat.kv.modes.base import Mode, ModeReport, Plan, Step, budget_of, refuse_small_budget
from kvchat_strided.parameters import StridedParameters


class Strided(Mode):
    """Sinks (the system prompt where it is pinned), a window, and k pages that are the same in all layers and heads."""

    parameters: StridedParameters

    def _set_up(self) -> None:
        self.budget, self.window = budget_of(self.parameters, self.traits.context), self.parameters.window
        refuse_small_budget(self.name, self.budget, self.sink, self.window)
        self.k = (self.budget - self.window) // self.geometry.page
        self._pin_to_sinks()

    def plan(self, capacity: int) -> Plan:
        pinned = len(self.pins)
        return Plan([Layout(0, self.geometry.layers, self.sink, self.window, self.k, shared=False, pinned=pinned)])

    def fill(self, fresh: bool) -> None:
        super().fill(fresh)  # sinks, pinned messages and the window
        self._fill_slots(self.state.position)

    def prepare_step(self) -> Step:
        return Step(exact=self.state.total < self.sink + self.window)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)  # the new token's slot
        self._fill_slots(position)

    def _fill_slots(self, position: Tensor) -> None:
        """Recall the pages that the token at ``position`` (0-d, on the device) reads, and let attention read them."""
        (slots,) = self.state.slots
        last = position - self.window
        newest = torch.div(last, self.geometry.page * self.parameters.stride, rounding_mode="floor")
        slot = torch.arange(self.k, device=position.device)
        chosen = newest - (newest - slot) % self.k  # each page keeps its slot, so that one moves at a time
        placed = torch.where(chosen >= 0, chosen * self.parameters.stride, EMPTY)
        for layer in range(self.geometry.layers):
            resident = slots.pages_of(layer)
            self.state.transfer.load_pages(slots, layer, placed.expand_as(resident), resident)
        self._open_pages(slots, slice(None), last)

    def report(self) -> ModeReport:
        return ModeReport(self.parameters.model_dump() | {"budget": self.budget}, {"pages": self.k})
