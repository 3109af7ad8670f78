"""The base of methods that keep some tokens of a prompt and drop the others until the next prompt.

Every token has the slot of its position, and each KV head's table names the slots it keeps. Dropped tokens are neither
read nor copied but still take a slot: these modes show what methods read and how well that works, but save no device
memory.

``ObservedMode`` is for methods that use the queries of a prompt's last tokens. They keep decoded tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.config.modes import BudgetParameters
from kvchat.errors import UsageError
from kvchat.kv.attention import attend, causal_bias, products
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.modes.base import Mode, ModeReport, Plan, Step, budget_of

POOLED = 5  # neighboring tokens whose scores are averaged


class KeptMode(Mode):
    """A table per layer and KV head over slots for all tokens; a token's slot is its position."""

    def plan(self, capacity: int) -> Plan:
        return Plan([Layout(0, self.geometry.layers, 0, capacity, shared=False)])

    def kept(self, layer: int) -> Tensor:
        """Return the stored tokens that each head keeps, bool ``[H or 1, total]``; may omit those always read."""
        raise NotImplementedError

    def _wanted_table(self, slots: DeviceSlots, recent: int) -> Tensor:
        table = super()._wanted_table(slots, recent)
        if not (total := self.state.total):
            return table
        always = self._always(torch.arange(total, device=table.device))
        for layer in range(self.geometry.layers):
            table[layer, :, :total].masked_fill_(~(self.kept(layer) | always), EMPTY)
        return table

    def _always(self, tokens: Tensor) -> Tensor:
        """Return which ``tokens`` (positions or EMPTY, in any shape) are always read, because they are pinned."""
        pinned = (tokens >= 0) & (tokens < self.sink)
        return pinned | self._is_pinned(tokens) if self.pins else pinned


class ObservedMode(KeptMode):
    """Keeps the last ``window`` tokens of a prompt, and in each KV head the earlier tokens with the best scores."""

    parameters: BudgetParameters

    def _set_up(self) -> None:
        self.budget = budget_of(self.parameters, self.traits.context)
        if self.window >= self.budget:
            raise UsageError(
                f"The {self.name} budget is too small.",
                f"budget = {self.budget} tokens is not more than window = {self.window}.",
                "Use a larger budget or a smaller window.",
            )
        self._pin_to_sinks()

    def scores(self, layer: int, weights: Tensor) -> Tensor:
        """Return the scores ``[H, n]`` of the n tokens before the window.

        ``weights [H, G, w, n]`` (float32) are the weights that the prompt's last w queries give them.
        """
        raise NotImplementedError

    def rooms(self, tokens: int) -> list[int]:
        """Return how many of ``tokens`` before the window each layer keeps; called after ``scores`` of all layers."""
        return [self.budget - self.window] * self.geometry.layers

    def fill(self, fresh: bool) -> None:
        layers = range(self.geometry.layers)
        self.observed = len(self._observed_queries(0)[0])
        before = max(0, self._observed_queries(0)[0].stop - self.window)
        self.dropped = [0] * len(layers)
        if before > self.budget - self.window:
            self._scores = [self.scores(layer, self.weights(layer, before)) for layer in layers]
            self.dropped = [max(0, before - room) for room in self.rooms(before)]
        super().fill(fresh)
        self._scores = []

    def kept(self, layer: int) -> Tensor:
        heads, total = self.geometry.kv_heads, self.state.total
        kept = torch.ones((heads, total), dtype=torch.bool, device=self.state.device)
        if dropped := self.dropped[layer]:
            scores = self._scores[layer]
            before = scores.shape[1]
            kept[:, :before] = False
            kept.scatter_(1, scores.topk(before - dropped, -1).indices, True)
        return kept

    def weights(self, layer: int, tokens: int) -> Tensor:
        """Return the weights ``[H, G, w, n]`` of the prompt's last w queries for its first n = ``tokens``.

        The softmax is over all tokens that a query sees.
        """
        g, (span, query) = self.geometry, self._observed_queries(layer)
        spec = self.state.specs[layer]
        keys = self.state.host.dense(layer, span.stop)[0]
        grouped = query.float().reshape(g.kv_heads, -1, g.d_k)
        bias = causal_bias(span.start, len(span), 0, spec.window, grouped)
        bias = bias.repeat(g.group, 1)  # a group's queries are rows of one matrix
        sinks = None if spec.sinks is None else spec.sinks.view(g.kv_heads, -1).repeat_interleave(len(span), 1)
        rows = []
        for head in range(g.kv_heads):  # one at a time, to save memory
            at = slice(head, head + 1)
            own = keys[at].float()
            held = products(own, own[..., :0])  # without values
            weights = attend(grouped[at], held, bias, spec, None if sinks is None else sinks[at])[1]
            rows.append(weights[..., :tokens].reshape(1, g.group, len(span), -1))
        return torch.cat(rows)

    def prepare_step(self) -> Step:
        return Step(exact=not any(self.dropped))

    def report(self) -> ModeReport:
        chosen = {"budget": self.budget, "window": self.window}
        stats = {"observed": self.observed, "dropped": round(sum(self.dropped) / len(self.dropped))}
        return ModeReport(self.parameters.model_dump() | chosen, stats)

    def _observed_queries(self, layer: int) -> tuple[range, Tensor]:
        """Return positions and queries ``[H_q, w, d_k]`` of the prompt's end; the last token's if none are known."""
        span, query = self.state.prompt.of(layer, self.window)
        if span:
            return span, query
        total = self.state.total
        return range(max(0, total - 1), total), self.state.query[layer].unsqueeze(1)[:, : min(1, total)]


def pooled(scores: Tensor) -> Tensor:
    """Return ``scores [..., n]``, each averaged with its neighbors; the ends are padded with zeros."""
    shape = scores.shape
    return torch.nn.functional.avg_pool1d(scores.reshape(-1, 1, shape[-1]), POOLED, 1, POOLED // 2).view(shape)
