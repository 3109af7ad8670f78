"""razor: a few heads keep everything, the others the first and the most recent tokens.

Paper: RazorAttention (arXiv 2407.15891), algorithm 1. Retrieval heads keep all tokens; of a prompt of N tokens the
others keep the first 4 and the last max(S0, N / C), and as many while it is decoded.

Departures:
    * Retrieval heads are found by kvchat's calibration, which measures how well each KV head finds a hidden fact. The
      paper takes 14 % for induction and 1 % for echo, by a random sequence that is repeated; here it is 15 % in all.
    * What the other heads drop is not averaged into a compensation token: attention has no bias for one slot.
    * S0 is the budget less the 4; the paper's is remembered to be 4,000, its C 5.
    * N is counted anew at every prompt, from everything stored.
    * The memory saved is not saved (``kept``).

Until the model's heads are calibrated everything is read.

Shapes: tables ``[layers, H, n]``. Costs: a step looks at all tables once; nothing moves.
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
PROMPT_SHARE = 5  # of the prompt's tokens one in so many is recent, at least


class Razor(KeptMode):
    """Retrieval heads keep everything, others sinks and a window."""

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
        told = "all: not calibrated yet" if self.needs_calibration else f"{len(self.retrieval)} of {heads}"
        stats = {"retrieval heads": told, "recent": self.window}
        return ModeReport(self.parameters.model_dump() | {"budget": self.budget}, stats)
