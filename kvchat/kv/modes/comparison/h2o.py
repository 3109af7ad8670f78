"""h2o: reads the tokens that got the most attention so far, and the most recent ones.

Paper: H2O (arXiv 2306.14048). Each KV head sums, for every token, the weights that all queries gave it. It keeps the
tokens with the highest sums (half of the budget) and the most recent ones. Each decoded token drops the token with the
lowest sum that is no longer recent.

Departures:
    * Only the weights of a prompt's last tokens, at most 32, are summed, because those of all tokens would grow with
      the square of its length. (The paper's sums favor early tokens, which more queries see; these do not.)
    * Every prompt chooses again, from all stored tokens. If the mode is entered or tokens are withdrawn during an
      answer, the last token's query chooses. The paper drops tokens for good.
    * A query's weight for a KV head is the maximum over its group; the paper's models have groups of one.
    * The budget is a number of tokens; in the paper each half is a tenth of the prompt.
    * It saves no memory (``kept``).

Shapes: tables and sums ``[layers, H, n]``. Costs: as snapkv, and in each layer of a step the weights of all slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes.base import Plan, Step, budget_of
from kvchat.kv.modes.comparison.kept import KeptMode, ObservedMode
from kvchat.kv.state import KVState

HALVES = 2  # one half of the budget for recent tokens, one for others


class H2O(ObservedMode):
    """Reads the tokens with the highest sums, and as many recent ones."""

    def _set_up(self) -> None:
        self.window = budget_of(self.parameters, self.traits.context) // HALVES
        super()._set_up()
        self.heavy = self.budget - self.window

    def plan(self, capacity: int) -> Plan:
        (layout,) = super().plan(capacity).layouts
        g = self.geometry
        return Plan([layout], g.layers * g.kv_heads * layout.slots(g.page) * torch.float32.itemsize)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self.sums = torch.zeros(self.slots.table.shape, device=state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self.sums]

    def fill(self, fresh: bool) -> None:
        total, layers = self.state.total, range(self.geometry.layers)
        self._grow()
        self.sums.zero_()
        for layer in layers if total else ():
            self.sums[layer, :, :total] = self.weights(layer, total).amax(1).sum(1)
        self.observed = len(self._observed_queries(0)[0])
        before = max(0, total - self.window)
        self.dropped = [max(0, before - self.heavy)] * len(layers)
        always = self._always(torch.arange(before, device=self.state.device))
        self._scores = [sums.masked_fill(always, -1) for sums in self.sums[:, :, :before]]
        KeptMode.fill(self, fresh)
        self._scores = []

    def prepare_step(self) -> Step:
        self._grow()
        return Step(exact=self.state.total < self.budget)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        table = self.slots.table_of(layer)
        may_go = (table >= 0) & (table <= self.state.position - self.window) & ~self._always(table)
        worst = self.sums[layer].masked_fill(~may_go, torch.inf).argmin(-1, keepdim=True)
        over = may_go.sum(-1, keepdim=True) > self.heavy
        table.scatter_(1, worst, table.gather(1, worst).masked_fill(over, EMPTY))
        return True

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        self.sums[layer] += weights[0].best()

    def _observed_queries(self, layer: int) -> tuple[range, Tensor]:
        span, query = super()._observed_queries(layer)
        total = self.state.total
        if span.stop == total:
            return span, query
        return range(total - 1, total), self.state.query[layer].unsqueeze(1)

    def _grow(self) -> None:
        """Extend the sums to all slots."""
        if (more := self.slots.n - self.sums.shape[2]) > 0:
            self.sums = torch.nn.functional.pad(self.sums, (0, more))
