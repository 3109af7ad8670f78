"""The reference of freeze mode: ASR-KF-EGR, Algorithm 1, simulated token by token in plain Python."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from support.dense_attention import softmax
from support.reference import Conversation, FullReference
from torch import Tensor

from kvchat.kv.modes.freeze import RESIZE_INTERVAL


def best(rank: dict[int, float], n: int, theirs: Set[int]) -> set[int]:
    """Return the ``n`` tokens of the lowest ``rank``; prefer ``theirs`` among ranks that rounding cannot tell apart."""
    order = sorted(rank, key=lambda j: rank[j])
    if not 0 < n < len(order):
        return set(order[: max(n, 0)])
    edge = rank[order[n - 1]]
    near = 1e-6 * max(abs(edge), 1e-3)
    sure = {j for j in order if rank[j] < edge - near}
    close = sorted((j for j in order if abs(rank[j] - edge) <= near), key=lambda j: j not in theirs)
    return sure | set(close[: n - len(sure)])


@dataclass
class Simulation:
    """Freeze timers of tokens that share slots, one token at a time; ``scores`` come from the caller.

    Positions stand for tokens; ``p`` are the mode's parameters. ``c`` counts detections, ``d`` the steps that a frozen
    token has still to stay away (0 or less: it waits for room to return). ``theirs`` are the tokens that the kv has
    frozen, asked only where ranks are equal.
    """

    p: dict[str, Any]
    pinned: set[int] = field(default_factory=set)
    total: int = 0
    c: dict[int, int] = field(default_factory=dict)
    d: dict[int, int] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)

    def active(self) -> set[int]:
        return set(range(self.total)) - set(self.d)

    def step(self, scores: dict[int, float], room: float = math.inf, theirs: Set[int] = frozenset()) -> None:
        """Advance after an attention over the tokens of ``scores``; at most ``room`` tokens may be active."""
        leaving = self._leaving(scores, theirs)
        for j, s in scores.items():
            self.c[j], self.score[j] = self._count(j, s), s
        steps = {j: self._steps(self.c[j]) for j in leaving}
        if self.p["same_step"]:  # one that were to leave and return at once does not move
            steps = {j: n - 1 for j, n in steps.items()}
        self.d = {j: n - 1 for j, n in self.d.items()} | {j: max(n, 1) for j, n in steps.items()}
        self._return(room, theirs)

    def enter(self, total: int, scores: Callable[[], dict[int, float]], theirs: Set[int], new: bool) -> None:
        """Start from ``total`` stored tokens, some ``new``; ``scores`` computes relevance to the last token."""
        self.total, most = total, self.p["max_active"]
        self.c = {j: c for j, c in self.c.items() if j < total and not (new and self.p["wake"])}
        self.score = {j: s for j, s in self.score.items() if j < total}
        self.d = {j: n for j, n in self.d.items() if j < total - self.p["window"] and not (new and self.p["wake"])}
        if self.d or (most and total >= most):
            self.score = scores()
            self.d = {j: n for j, n in self.d.items() if self.score[j] < self.p["tau"]}
        if most:
            may = {j: self.score.get(j, 0.0) for j in self.active() if self._may(j)}
            self.d |= dict.fromkeys(best(may, len(self.active()) - (most - 1), theirs), 1)

    def _may(self, j: int) -> bool:
        """The token may be frozen."""
        old = self.p["sink"] <= j < self.total - self.p["window"]
        return old and not (self.p["protect"] and j in self.pinned)

    def _count(self, j: int, s: float) -> int:
        c = self.c.get(j, -(j % self.p["stagger"]))
        if s > self.p["tau"] and c > 0:
            c //= 2
        elif s < self.p["tau"] and self._may(j):
            c += 1
        return min(c, self.p["history"]) if self.p["history"] else c

    def _steps(self, c: int) -> int:
        return math.floor(math.sqrt(max(c, 0)) / self.p["k"])

    def _leaving(self, scores: dict[int, float], theirs: Set[int]) -> set[int]:
        """Return the tokens flagged often enough, more of them above the ceiling, none below the floor."""
        p, least = self.p, 1 + self.p["same_step"]
        may = {j: s for j, s in scores.items() if self._may(j)}
        flagged = {j: s for j, s in may.items() if s < p["tau"] and self._steps(self._count(j, s)) >= least}
        others = {j: s for j, s in may.items() if j not in flagged}
        over = len(scores) + 1 - p["max_active"] if p["max_active"] else 0
        n = min(max(len(flagged), over), len(scores) - p["min_active"])
        return best(flagged, n, theirs) | best(others, n - len(flagged), theirs)

    def _return(self, room: float, theirs: Set[int]) -> None:
        """Return tokens whose timer ran out, the most relevant and longest waiting first, while there is room."""
        waiting = {j: -(self.score.get(j, 0.0) + 0.01) * (1 - n) for j, n in self.d.items() if n <= 0}
        n = min(len(waiting), self.p["moves"], max(0, room - len(self.active())))
        for j in best(waiting, int(n), set(range(self.total)) - theirs):
            del self.d[j]


class FreezeReference(FullReference):
    """ASR-KF-EGR: one simulation for all layers, or one per layer.

    The store's own scores, once found right to rounding, decide whether a token is flagged, so that rounding never
    does. How many slots there are is the store's business as well: returning tokens fit in or wait.
    """

    def __init__(self, run: Conversation, p: dict[str, Any]) -> None:
        layers = range(run.toy.geometry.layers)
        self.groups = [[layer] for layer in layers] if p["per_layer"] else [list(layers)]
        self.simulations = [Simulation(p) for _ in self.groups]
        super().__init__(run, p)

    def enter(self, num_reachable: int) -> None:
        total = len(self.run.ids)
        for i, simulation in enumerate(self.simulations):
            scores = functools.partial(self._scores, i, set(range(total)))
            simulation.enter(total, scores, self._theirs(i), new=total > simulation.total)

    def reads(self, layer: int, query: Tensor) -> Tensor:
        i = next(i for i, layers in enumerate(self.groups) if layer in layers)
        return self._mask(self.simulations[i].active() | {len(self.run.ids) - 1})

    def end(self) -> None:
        for i, simulation in enumerate(self.simulations):
            simulation.total = len(self.run.ids)
            room = self.run.kv.state.slots[i].n - RESIZE_INTERVAL
            if self.p["max_active"]:
                room = min(room, self.p["max_active"] - 1)
            simulation.step(self._scores(i, simulation.active(), simulation.score), room, self._theirs(i))

    def _theirs(self, i: int) -> set[int]:
        return set(self.run.kv.mode.timers[i].frozen[: len(self.run.ids)].nonzero().flatten().tolist())

    def _mask(self, tokens: set[int]) -> Tensor:
        mask = torch.zeros(self.run.toy.geometry.kv_heads, len(self.run.ids), dtype=torch.bool)
        mask[:, sorted(tokens)] = True
        return mask

    def _scores(self, i: int, tokens: set[int], before: dict[int, float] | None = None) -> dict[int, float]:
        """The store's scores of ``tokens``, held against float64: over the layers that can see the token.

        ``before`` are earlier scores, a share of which counts.
        """
        mask = self._mask(tokens)
        found = [self._relevance(layer, mask) for layer in self.groups[i]]
        if self.p["score"] == "prob_max":
            scores = torch.stack([score for score, _ in found]).amax(0)
        else:
            scores = sum(score for score, _ in found) / sum(seen for _, seen in found).clamp(min=1)
        for j in tokens:
            if (earlier := (before or {}).get(j, 0.0)) > 0:
                scores[j] += self.p["smooth"] * (earlier - scores[j])
        theirs = self.run.kv.mode.timers[i].score[: len(self.run.ids)].double()
        if self.run.exact:
            torch.testing.assert_close(theirs[mask[0]], scores[mask[0]], atol=1e-5, rtol=1e-4)
        return {j: float(theirs[j]) for j in tokens}

    def _relevance(self, layer: int, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[T]`` (0 outside ``mask`` and the layer's window) and which tokens the window covers."""
        spec, total, query, kind = self.run.toy.specs[layer], len(self.run.ids), self.run.query[layer], self.p["score"]
        seen = torch.arange(total) >= total - (spec.window or total)
        if kind == "always":
            return torch.zeros(total, dtype=torch.float64), seen.double()
        if kind in ("prob_max", "prob_rel"):
            weights = softmax(query, self.run.keys[layer], mask & seen, spec)
            counted = mask[0] & seen & (torch.arange(total) >= self.p["sink"])
            if kind == "prob_max":
                return weights.amax(0) * counted.sum(), seen.double()
            shares = weights * counted.sum() / weights[:, counted].sum(1, keepdim=True).clamp(min=1e-300)
            return shares.mean(0), seen.double()
        keys = self.run.keys[layer].double().repeat_interleave(self.run.toy.geometry.group, 0)
        products = (keys @ query.double()[:, :, None])[:, :, 0].abs().mean(0)
        return products * (spec.scaling if kind == "scaled" else 1.0) * seen, seen.double()
