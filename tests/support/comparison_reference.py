"""References for the comparison modes, written from the papers' rules in plain loops and float64.

Nothing is taken from the modes or from ``kv.ops``; numbers chosen by kvchat are repeated here.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from support.dense_attention import softmax
from support.reference import Conversation, FullReference
from support.toy_model import calibration
from torch import Tensor

ROWS = 32  # known queries at a prompt's end


class ComparisonReference(FullReference):
    """Its budget is that of the parameters; what is pinned comes on top: ``pins`` and the system prompt."""

    def __init__(self, run: Conversation, p: dict[str, Any]) -> None:
        extra = run.kv.mode.extra_sinks
        super().__init__(run, p | {"budget": p["budget"] - extra})

    @property
    def pinned(self) -> set[int]:
        return {*self.run.pins, *range(self.run.kv.mode.pinned)}


class PageReference(ComparisonReference):
    """Pages: sinks, the newest ones and k others, in a layer with a window among those that it sees."""

    sinks, newest = 0, 1

    def enter(self, num_reachable: int) -> None:
        self.page = self.run.toy.geometry.page
        self.k = self.p["budget"] // self.page - self.sinks - self.newest
        self.full_layers = min(self.p.get("whole_layers", 0), self.run.toy.geometry.layers - 1)

    def reads(self, layer: int, query: Tensor) -> Tensor:
        if layer < self.full_layers:
            return super().reads(layer, query)
        now = len(self.run.ids) - 1
        mask = torch.zeros(self.run.toy.geometry.kv_heads, now + 1, dtype=torch.bool)
        mask[:, : self.sinks * self.page] = True
        mask[:, max(0, (now // self.page - self.newest + 1) * self.page) :] = True
        for head, pages in enumerate(self.pages(layer, query, now)):
            for page in pages:
                mask[head, page * self.page : (page + 1) * self.page] = True
        return mask

    def pages(self, layer: int, query: Tensor, now: int) -> list[list[int]]:
        """The other pages that each head reads for the token at position ``now``."""
        raise NotImplementedError

    def candidates(self, layer: int, now: int) -> list[int]:
        window = self.run.toy.specs[layer].window
        seen = 0 if window is None else now + 1 - window
        first = max(self.sinks, self.run.kv.mode.pinned // self.page)
        return [page for page in range(first, now // self.page - self.newest + 1) if (page + 1) * self.page > seen]

    def tile(self, layer: int, head: int, page: int) -> Tensor:
        """The keys of a page, ``[page, d_k]``."""
        return self.run.keys[layer][head, page * self.page : (page + 1) * self.page].double()

    def group(self, query: Tensor, head: int) -> Tensor:
        """The queries of a KV head, ``[G, d_k]``."""
        size = self.run.toy.geometry.group
        return query[head * size : (head + 1) * size].double()


def bound(query: Tensor, low: Tensor, high: Tensor) -> float:
    """The highest product that a key between ``low`` and ``high`` can have with the query."""
    return float(sum(max(q * a, q * b) for q, a, b in zip(query.tolist(), low.tolist(), high.tolist(), strict=True)))


def quest_score(reference: PageReference, layer: int, head: int, page: int, query: Tensor) -> float:
    """A page's highest bound among the query heads of a KV head."""
    tile = reference.tile(layer, head, page)
    return max(bound(q, tile.amin(0), tile.amax(0)) for q in reference.group(query, head))


class QuestReference(PageReference):
    """The k pages with the highest bounds."""

    def pages(self, layer: int, query: Tensor, now: int) -> list[list[int]]:
        candidates = self.candidates(layer, now)
        return [
            sorted(candidates, key=lambda page, head=head: -quest_score(self, layer, head, page, query))[: self.k]
            for head in range(self.run.toy.geometry.kv_heads)
        ]


class ArkValeReference(PageReference):
    """Pages as boxes; the best k / 2 become resident and replace the worst."""

    sinks, newest = 2, 2

    def enter(self, num_reachable: int) -> None:
        super().enter(num_reachable)
        total = len(self.run.ids)
        self.resident = {
            layer: self._best(layer, self.run.query[layer], self.candidates(layer, total))[: self.k]
            for layer in range(self.run.toy.geometry.layers)
        }

    def pages(self, layer: int, query: Tensor, now: int) -> list[list[int]]:
        candidates = self.candidates(layer, now)
        held = [page for page in self.resident[layer] if page in candidates]
        if now % self.page == 0:
            held += [page for page in candidates[-1:] if page == now // self.page - self.newest and page not in held]
        ranked = self._best(layer, query, candidates)
        top = ranked[: max(1, self.k // 2)]
        others = [page for page in ranked if page in held and page not in top] if held else ranked[len(top) :]
        self.resident[layer] = (top + others)[: self.k]
        return [self.resident[layer]] * self.run.toy.geometry.kv_heads

    def _best(self, layer: int, query: Tensor, candidates: list[int]) -> list[int]:
        def score(page: int) -> float:
            total = 0.0
            for head in range(self.run.toy.geometry.kv_heads):
                tile = self.tile(layer, head, page)
                center = (tile.amax(0) + tile.amin(0)) / 2
                radius = (center - tile).abs().mean(0)
                total += sum(bound(q, center - radius, center + radius) for q in self.group(query, head))
            return total

        return sorted(candidates, key=lambda page: -score(page))


class ShadowKVReference(PageReference):
    """Outliers with the lowest cosine to the mean key, and others by the softmax over mean keys."""

    newest = 2

    def enter(self, num_reachable: int) -> None:
        super().enter(num_reachable)
        geometry, full = self.run.toy.geometry, len(self.run.ids) // self.page - 1
        self.outliers = {}
        for layer, head in product(range(geometry.layers), range(geometry.kv_heads)):
            ranked = sorted(range(full), key=lambda page, at=(layer, head): self._lowest_cosine(*at, page))
            self.outliers[layer, head] = ranked[: self.k // 6]

    def pages(self, layer: int, query: Tensor, now: int) -> list[list[int]]:
        chosen = []
        for head in range(self.run.toy.geometry.kv_heads):
            candidates = self.candidates(layer, now)
            always = [page for page in candidates if page in self.outliers[layer, head]]
            others = [page for page in candidates if page not in always]
            if others:
                means = torch.stack([self.tile(layer, head, page).mean(0) for page in others])
                logits = self.group(query, head) @ means.T * self.run.toy.specs[layer].scaling
                shares = logits.softmax(-1).amax(0).tolist()
                others = [page for _, page in sorted(zip(shares, others, strict=True), reverse=True)]
            chosen.append((always + others)[: self.k])
        return chosen

    def _lowest_cosine(self, layer: int, head: int, page: int) -> float:
        tile = self.tile(layer, head, page)
        mean = tile.mean(0)
        return min(float(key @ mean / (key.norm() * mean.norm())) for key in tile)


class RaaSReference(PageReference):
    """The prompt, and the pages of the answer with the newest times."""

    def enter(self, num_reachable: int) -> None:
        geometry = self.run.toy.geometry
        self.page = geometry.page
        self.most = max(1, self.p["budget"] // self.page)
        self.first = geometry.pages(len(self.run.ids))
        heads = [(layer, head) for layer in range(geometry.layers) for head in range(geometry.kv_heads)]
        self.times: dict[tuple[int, int], dict[int, int]] = {at: {} for at in heads}

    def reads(self, layer: int, query: Tensor) -> Tensor:
        now = len(self.run.ids) - 1
        newest = now // self.page
        mask = torch.zeros(self.run.toy.geometry.kv_heads, now + 1, dtype=torch.bool)
        for head in range(len(mask)):
            times = self.times[layer, head]
            if newest >= self.first:
                times[newest] = now
            if len(times) > self.most:
                del times[min((page for page in times if page != newest), key=lambda page, t=times: (t[page], page))]
            full = [page for page in times if page != newest]
            ranked = sorted(full, key=lambda page, head=head: -quest_score(self, layer, head, page, query))
            times.update(dict.fromkeys(ranked[: math.ceil(len(full) / 2)], now))
            mask[head, : self.first * self.page] = True
            for page in times:
                mask[head, page * self.page : (page + 1) * self.page] = True
        return mask


class RazorReference(ComparisonReference):
    """Retrieval heads, by the toy's calibration, read everything; the others 4 sinks and a window."""

    def enter(self, num_reachable: int) -> None:
        self.recent = max(self.p["budget"] - 4, len(self.run.ids) // 5)
        retrieval = calibration(self.run.toy.geometry).retrieval
        heads = [(layer, head) for layer, scores in enumerate(retrieval) for head in range(len(scores))]
        heads.sort(key=lambda at: (-retrieval[at[0]][at[1]], at))
        self.retrieval = heads[: max(1, round(self.p["share"] * len(heads)))]

    def reads(self, layer: int, query: Tensor) -> Tensor:
        mask = super().reads(layer, query)
        now = len(self.run.ids) - 1
        for head in range(len(mask)):
            if (layer, head) not in self.retrieval:
                mask[head, 4 : max(4, now + 1 - self.recent)] = False
        return mask


class Observed:
    """The weights that the recorded queries of a prompt's last tokens give every token."""

    def __init__(self, run: Conversation, layer: int, most: int, noted: dict[int, Tensor] | None = None) -> None:
        noted = noted or run.asked[layer] or {len(run.ids) - 1: run.query[layer]}
        self.end = max(noted) + 1 if run.ids else 0
        first = self.end
        while first - 1 in noted and self.end - first < most:
            first -= 1
        keys, spec = run.keys[layer][:, : self.end], run.toy.specs[layer]
        tokens = torch.arange(self.end)
        rows = []
        for position in range(first, self.end):
            seen = (tokens <= position) & (tokens > position - (spec.window or self.end + 1))
            rows.append(softmax(noted[position], keys, seen.expand(len(keys), -1), spec))
        # By KV head, query head of its group, query and token.
        self.weights = torch.stack(rows, 1).unflatten(0, (len(keys), -1)) if rows else torch.zeros(0)


def smoothed(scores: Tensor) -> Tensor:
    """``scores [..., n]`` averaged over five neighbors, of which those beyond the ends count as 0."""
    n = scores.shape[-1]
    return torch.stack([scores[..., max(0, t - 2) : t + 3].sum(-1) / 5 for t in range(n)], -1)


class SnapKVReference(ComparisonReference):
    """Keeps the tokens of a prompt that the queries of its window choose."""

    def enter(self, num_reachable: int) -> None:
        geometry = self.run.toy.geometry
        self.window = self.p["window"]
        seen = [Observed(self.run, layer, self.window) for layer in range(geometry.layers)]
        self.before = max(0, seen[0].end - self.window)
        self.kept: dict[int, list[list[int]]] = {}
        if self.before <= self.p["budget"] - self.window:
            return
        found = [one.weights[..., : self.before] for one in seen]
        for layer, budget in enumerate(self.budgets(found)):
            scores = self.scores(found[layer])
            self.kept[layer] = [row.argsort(descending=True)[:budget].tolist() for row in scores]

    def scores(self, weights: Tensor) -> Tensor:
        return smoothed(weights.sum(2)).mean(1)

    def budgets(self, weights: list[Tensor]) -> list[int]:
        return [self.p["budget"] - self.window] * len(weights)

    def reads(self, layer: int, query: Tensor) -> Tensor:
        mask = super().reads(layer, query)
        for head, kept in enumerate(self.kept.get(layer, ())):
            mask[head, : self.before] = False
            mask[head, kept] = True
        return mask


class PyramidKVReference(SnapKVReference):
    """Budgets that fall from layer to layer."""

    def budgets(self, weights: list[Tensor]) -> list[int]:
        layers, b = len(weights), self.p["budget"] - self.window
        if self.before + self.window < 2 * b or layers == 1:
            return super().budgets(weights)
        low = b // self.p["beta"]
        high = 2 * b - low
        if high >= self.before:
            high, low = self.before, 2 * b - self.before
        return [high - layer * ((high - low) // (layers - 1)) for layer in range(layers)]


class CakeReference(SnapKVReference):
    """Preferences by entropy and variance, and scores by mean and variance."""

    def scores(self, weights: Tensor) -> Tensor:
        return smoothed(weights.mean(2) + self.p["gamma"] * self._variance(weights)).mean(1)

    def budgets(self, weights: list[Tensor]) -> list[int]:
        total = (self.p["budget"] - self.window) * len(weights)
        preferences = []
        for one in weights:
            entropy = -sum(float(a * math.log(a + 1e-10)) for a in one.flatten().tolist())
            shift = float(self._variance(one).sum())
            preferences.append(entropy ** (1 / self.p["tau1"]) * shift ** (1 / self.p["tau2"]))
        whole = sum(preferences)
        equal = total / len(weights)
        budgets = [min(self.before, int(each * total / whole if whole else equal)) for each in preferences]
        layer = 0
        while sum(budgets) < total and min(budgets) < self.before:  # one token a layer, in turn
            budgets[layer] += budgets[layer] < self.before
            layer = (layer + 1) % len(budgets)
        return budgets

    def _variance(self, weights: Tensor) -> Tensor:
        rows = weights.shape[2]
        if rows == 1:
            return torch.zeros_like(weights[:, :, 0])
        off = weights - weights.mean(2, keepdim=True)
        return (off**2).sum(2) / (rows - 1)


class H2OReference(ComparisonReference):
    """A sum of weights per token; half of the budget for the highest, half for the most recent."""

    def enter(self, num_reachable: int) -> None:
        self.recent = self.p["budget"] // 2
        self.heavy = self.p["budget"] - self.recent
        geometry, total = self.run.toy.geometry, len(self.run.ids)
        self.sums, self.kept = {}, {}
        for layer in range(geometry.layers):
            seen = Observed(self.run, layer, min(ROWS, self.recent))
            if seen.end != total:  # in the middle of an answer: the last token's query
                seen = Observed(self.run, layer, 1, {total - 1: self.run.query[layer]})
            sums = seen.weights.amax(1).sum(1) if total else torch.zeros(geometry.kv_heads, 0)
            for head in range(geometry.kv_heads):
                self.sums[layer, head] = sums[head].tolist()
                self.kept[layer, head] = self._kept(layer, head, list(range(total)), total - 1)

    def reads(self, layer: int, query: Tensor) -> Tensor:
        geometry, now = self.run.toy.geometry, len(self.run.ids) - 1
        mask = torch.zeros(geometry.kv_heads, now + 1, dtype=torch.bool)
        for head in range(geometry.kv_heads):
            self.sums[layer, head].append(0.0)
            self.kept[layer, head] = self._kept(layer, head, [*self.kept[layer, head], now], now)
            mask[head, self.kept[layer, head]] = True
        mask[:, sorted(self.pinned & {*range(now + 1)})] = True
        seen = mask.clone()
        if (window := self.run.toy.specs[layer].window) is not None:
            seen[:, : max(0, now + 1 - window)] = False
        weights = softmax(query, self.run.keys[layer], seen, self.run.toy.specs[layer])
        best = weights.unflatten(0, (geometry.kv_heads, -1)).amax(1)
        for head in range(geometry.kv_heads):
            sums = self.sums[layer, head]
            sums[:] = [old + new for old, new in zip(sums, best[head].tolist(), strict=True)]
        return mask

    def _kept(self, layer: int, head: int, tokens: list[int], last: int) -> list[int]:
        sums, near = self.sums[layer, head], last + 1 - self.recent
        ranked = sorted(
            (token for token in tokens if token < near and token not in self.pinned), key=lambda token: -sums[token]
        )
        always = [token for token in tokens if token >= near or token in self.pinned]
        return ranked[: self.heavy] + always


COMPARISON: dict[str, type[FullReference]] = {
    "quest": QuestReference,
    "arkvale": ArkValeReference,
    "shadowkv": ShadowKVReference,
    "raas": RaaSReference,
    "razor": RazorReference,
    "snapkv": SnapKVReference,
    "pyramidkv": PyramidKVReference,
    "cake": CakeReference,
    "h2o": H2OReference,
}
