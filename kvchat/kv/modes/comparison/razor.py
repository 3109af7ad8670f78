"""razor: a few heads read everything, the others the first and the most recent tokens.

Paper: RazorAttention (arXiv 2407.15891), algorithm 1. Retrieval heads keep all tokens; the others keep the first 4 of a
prompt of N tokens and the last max(S0, N / C), and as many during decoding.

Departures:
    * Retrieval heads are the 15 % of the KV heads that find a hidden fact best in kvchat's calibration. The paper takes
      14 % for induction and 1 % for echo, measured on a repeated random sequence.
    * Dropped tokens are not averaged into a compensation token, because attention has no bias for single slots.
    * S0 is the budget minus 4; as remembered, the paper's S0 is 4,000 and its C is 5.
    * N is the number of stored tokens at every prompt.
    * It saves no memory (``kept``).

It reads everything until the model's heads are calibrated.

Shapes: tables ``[layers, H, n]``. Costs: a step updates all tables once; nothing moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.config.modes import RazorParameters
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes.base import ModeReport, Plan, Step, budget_of
from kvchat.kv.modes.comparison.kept import KeptMode
from kvchat.kv.state import KVState

SINK = 4
PROMPT_SHARE = 5  # the window has at least one in 5 of the prompt's tokens


class Razor(KeptMode):
    """Retrieval heads keep everything, the others keep sinks and a window."""

    parameters: RazorParameters

    def _set_up(self) -> None:
        self.budget, self.sink = budget_of(self.parameters, self.traits.context), SINK
        self._pin_to_sinks()
        self.needs_calibration = self.traits.calibration is None
        found = self.traits.calibration.retrieval if self.traits.calibration else ()
        ranked = sorted((-score, layer, head) for layer, heads in enumerate(found) for head, score in enumerate(heads))
        kept = max(1, round(self.parameters.share * len(ranked)))
        self.retrieval = [(layer, head) for _, layer, head in ranked[:kept]]

    def plan(self, capacity: int) -> Plan:
        heads = self.geometry.layers * self.geometry.kv_heads
        return Plan(super().plan(capacity).layouts, heads + torch.int64.itemsize)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        g = self.geometry
        self.recent = torch.zeros((), dtype=torch.int64, device=state.device)
        self.others = torch.full((g.layers, g.kv_heads, 1), bool(self.retrieval), device=state.device)
        for layer, head in self.retrieval:
            self.others[layer, head] = False

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self.recent, self.others]

    def fill(self, fresh: bool) -> None:
        self.window = max(self.budget - SINK, self.state.total // PROMPT_SHARE)
        self.recent.fill_(self.window)
        super().fill(fresh)

    def kept(self, layer: int) -> Tensor:
        tokens = torch.arange(self.state.total, device=self.state.device)
        return ~self.others[layer] | (tokens > self.state.total - self.window)

    def prepare_step(self) -> Step:
        return Step(exact=not self.retrieval or self.state.total < self.sink + self.window)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        table = self.slots.table
        leaves = (table <= position - self.recent) & self.others & ~self._always(table)
        table.masked_fill_(leaves, EMPTY)

    def report(self) -> ModeReport:
        heads = self.geometry.layers * self.geometry.kv_heads
        found = "all: not calibrated yet" if self.needs_calibration else f"{len(self.retrieval)} of {heads}"
        stats = {"retrieval heads": found, "recent": self.window}
        return ModeReport(self.parameters.model_dump() | {"budget": self.budget}, stats)
