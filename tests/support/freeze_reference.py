"""The reference for freeze mode: ASR-KF-EGR, Algorithm 1, simulated token by token in plain Python."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support.dense_attention import softmax
from support.reference import Conversation, FullReference
from torch import Tensor

from kvchat.kv.modes.freeze_timers import FOLLOWING, HOT_SCORE, RETRIEVED, RULES


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
    """Freeze timers, one token at a time; ``scores`` come from the caller.

    Tokens are identified by position; ``p`` are the mode's parameters. ``c`` counts detections, ``d`` the remaining
    steps of a frozen token (0 or less: only the budget keeps it frozen). ``pins`` are never frozen. ``theirs`` are the
    tokens that the KV manager has frozen, used only to break ties.
    """

    p: dict[str, Any]
    pinned: set[int] = field(default_factory=set)
    pins: Set[int] = frozenset()
    total: int = 0
    c: dict[int, int] = field(default_factory=dict)
    d: dict[int, int] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)
    prompt_end: int = 0
    at_prompt_end: tuple[dict[int, Any], ...] = ()

    def __post_init__(self) -> None:
        self.rule = RULES[self.p["profile"]]
        if self.p["floor"] is not None:
            self.rule = replace(self.rule, floor=self.p["floor"])

    def active(self) -> set[int]:
        return set(range(self.total)) - set(self.d)

    def step(self, scores: dict[int, float], hot: Set[int] = frozenset(), theirs: Set[int] = frozenset()) -> None:
        """Advance after an attention over the tokens of ``scores`` whose query finds the tokens ``hot``."""
        leaving = self._leaving(scores, theirs)
        for j, s in scores.items():
            self.c[j], self.score[j] = self._count(j, s), s
        # A token that would leave and return at once does not move.
        steps = {j: self._steps(self.c[j]) - self.rule.same_step for j in leaving}
        self.d = {j: n - 1 for j, n in self.d.items()} | {j: max(n, 1) for j, n in steps.items()}
        waiting = {j: n for j, n in self.d.items() if n <= 0}
        self.d = {j: n for j, n in self.d.items() if n > 0}
        self._thaw_hot(hot)
        self._limit(waiting, theirs)

    def enter(self, total: int, hot: Set[int], theirs: Set[int]) -> None:
        """Start from ``total`` stored tokens, after a prompt whose last query finds the tokens ``hot``.

        If only the last token of a prompt was read again, the state after that prompt is restored.
        """
        new, self.total = total - self.total, total
        self.c = {j: c for j, c in self.c.items() if j < total}
        self.score = {j: s for j, s in self.score.items() if j < total}
        self.d = {j: n for j, n in self.d.items() if j < total - self.p["K"]}
        if total < self.prompt_end - 1:
            self.prompt_end = 0
        if new > 1:
            self.prompt_end, self.at_prompt_end = total, (dict(self.c), dict(self.score), dict(self.d))
        elif new == 1 and total == self.prompt_end:
            self.c, self.score, self.d = map(dict, self.at_prompt_end)
        self.d = {j: n for j, n in self.d.items() if j not in self.pins}
        self._thaw_hot(hot)
        self._limit({}, theirs)

    def following(self, scores: dict[int, float]) -> set[int]:
        """Return each token that is being copied, by its score, and those that follow it."""
        if not self.rule.recalls:
            return set()
        retrieved = (j for j, s in scores.items() if self._may_freeze(j) and s > RETRIEVED * self.p["tau"])
        return {i for j in retrieved for i in range(j, min(j + FOLLOWING, self.total))}

    def _thaw_hot(self, hot: Set[int]) -> None:
        self.c |= dict.fromkeys(hot, 0)
        self.score |= dict.fromkeys(hot, HOT_SCORE)
        self.d = {j: n for j, n in self.d.items() if j not in hot}

    def _limit(self, waiting: dict[int, int], theirs: Set[int]) -> None:
        """Freeze the least relevant tokens above the budget; ``waiting`` ones return, the longest waiting first."""
        if self.p["budget"] is None:
            return
        urgency = {j: self.score.get(j, 0.0) for j in self.active() if self._may_freeze(j)}
        urgency |= {j: max(urgency[j], 0.01) * (1 - n) for j, n in waiting.items() if j in urgency}
        beyond = len([j for j in self.pins if j >= self.rule.sink])
        out = best(urgency, len(self.active()) - (self.p["budget"] + beyond - 1), theirs)
        self.d |= {j: waiting.get(j, 1) for j in out}

    def _may_freeze(self, j: int) -> bool:
        """Whether a token may be frozen."""
        old = self.rule.sink <= j < self.total - self.p["K"]
        return old and j not in self.pins and not (self.rule.protects and j in self.pinned)

    def _count(self, j: int, s: float) -> int:
        c = self.c.get(j, -(j % self.rule.stagger))
        if self.rule.recalls and s > self.p["tau"] and c > 0:
            return c // 2
        return c + 1 if s < self.p["tau"] and self._may_freeze(j) else c

    def _steps(self, c: int) -> int:
        return math.floor(math.sqrt(max(c, 0)) / self.p["k"])

    def _leaving(self, scores: dict[int, float], theirs: Set[int]) -> set[int]:
        """Return the tokens flagged often enough, so few that the floor remains active."""
        least = 1 + self.rule.same_step
        may = {j: s for j, s in scores.items() if self._may_freeze(j)}
        flagged = {j: s for j, s in may.items() if s < self.p["tau"] and self._steps(self._count(j, s)) >= least}
        return best(flagged, len(scores) - self.rule.floor, theirs) if self.rule.floor else set(flagged)


class FreezeReference(FullReference):
    """ASR-KF-EGR, one simulation for all layers.

    The manager's own scores, once checked up to rounding, decide whether a token is flagged, so that rounding never
    does.
    """

    def __init__(self, run: Conversation, p: dict[str, Any]) -> None:
        self.simulation = Simulation(p)
        super().__init__(run, p)

    def enter(self, num_reachable: int) -> None:
        self.simulation.pins = set(self.run.pins)
        self.simulation.enter(len(self.run.ids), self._hot_pages(), self._frozen_by_manager())

    def reads(self, layer: int, query: Tensor) -> Tensor:
        return self._mask(self.simulation.active() | {len(self.run.ids) - 1})

    def end(self) -> None:
        self.simulation.total = len(self.run.ids)
        scores = self._scores(self.simulation.active())
        hot = self._hot_pages() | self.simulation.following(scores)
        self.simulation.step(self._checked(scores, hot), hot, self._frozen_by_manager())

    def _frozen_by_manager(self) -> set[int]:
        return set(self.run.kv.mode.timers.frozen[: len(self.run.ids)].nonzero().flatten().tolist())

    def _mask(self, tokens: set[int]) -> Tensor:
        mask = torch.zeros(self.run.toy.geometry.kv_heads, len(self.run.ids), dtype=torch.bool)
        mask[:, sorted(tokens)] = True
        return mask

    def _hot_pages(self) -> set[int]:
        """Return the tokens of pages with more than half of a KV head's weight in sight, by Quest's bound."""
        g, total = self.run.toy.geometry, len(self.run.ids)
        if not self.simulation.rule.recalls or not total:
            return set()
        hot: set[int] = set()
        for layer, spec in enumerate(self.run.toy.specs):
            sight = total - (spec.window or total)
            pages = [page for page in range(g.pages(total)) if (page + 1) * g.page > sight]
            tiles = self.run.keys[layer][:, pages[0] * g.page :].double().split(g.page, 1)
            highest, lowest = (torch.stack(ends, 1) for ends in zip(*map(_ends, tiles), strict=True))
            for head in range(g.kv_heads):
                share = torch.zeros(len(pages), dtype=torch.float64)
                for q in self.run.query[layer][head * g.group : (head + 1) * g.group].double():
                    bounds = torch.maximum(q * highest[head], q * lowest[head]).sum(1)
                    share += (spec.scaling * bounds).softmax(0) / g.group
                hot |= {
                    j
                    for page, s in zip(pages, share.tolist(), strict=True)
                    if s > 0.5
                    for j in range(page * g.page, min((page + 1) * g.page, total))
                }
        return hot

    def _scores(self, tokens: set[int]) -> dict[int, float]:
        """Scores of ``tokens`` in float64, over the layers that can see the token."""
        mask = self._mask(tokens)
        found = [self._relevance(layer, mask) for layer in range(self.run.toy.geometry.layers)]
        scores = sum(score for score, _ in found) / sum(seen for _, seen in found).clamp(min=1)
        return {j: float(scores[j]) for j in tokens}

    def _checked(self, scores: dict[int, float], hot: Set[int]) -> dict[int, float]:
        """The manager's scores, checked against ``scores``, except for ``hot`` tokens, which it no longer scores."""
        theirs = self.run.kv.mode.timers.score[: len(self.run.ids)].double()
        if self.run.exact:
            compared = sorted(scores.keys() - hot)
            ours = torch.tensor([scores[j] for j in compared], dtype=torch.float64)
            torch.testing.assert_close(theirs[compared], ours, atol=1e-5, rtol=1e-4)
        return {j: score if j in hot else float(theirs[j]) for j, score in scores.items()}

    def _relevance(self, layer: int, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[T]``, valid in ``mask``, 0 outside the layer's window, and which tokens that covers."""
        spec, total, query, kind = self.run.toy.specs[layer], len(self.run.ids), self.run.query[layer], self.p["score"]
        seen = torch.arange(total) >= total - (spec.window or total)
        if kind == "always":
            return torch.zeros(total, dtype=torch.float64), seen.double()
        if kind == "prob_rel":
            weights = softmax(query, self.run.keys[layer], mask & seen, spec)
            counted = mask[0] & seen & (torch.arange(total) >= self.simulation.rule.sink)
            shares = weights * counted.sum() / weights[:, counted].sum(1, keepdim=True).clamp(min=1e-300)
            return shares.mean(0), seen.double()
        keys = self.run.keys[layer].double().repeat_interleave(self.run.toy.geometry.group, 0)
        return (keys @ query.double()[:, :, None])[:, :, 0].abs().mean(0) * seen, seen.double()


def _ends(page: Tensor) -> tuple[Tensor, Tensor]:
    """The element-wise maximum and minimum of a page's keys ``[H, n, d_k]``."""
    return page.amax(1), page.amin(1)
