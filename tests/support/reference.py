"""An independent reference for the KV modes: the set of tokens that each step attends to.

Nothing here is taken from the modes: the sets follow the papers (Lazy Pruning/Slack/Max_Drop, Algorithm 1; FreeKV,
sections 3.2 and 3.3; SyncKV, equations 3 to 8) in plain loops; freeze mode's is in ``freeze_reference``. A new mode
needs a class in ``kv_run.REFERENCES`` and a row in ``mode_rows``.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

import torch
from support.dense_attention import rotated, softmax
from support.toy_model import Toy, calibration
from torch import Tensor

from kvchat.kv.manager import KVManager


class Conversation(Protocol):
    """What a reference reads of its run.

    What is stored, the last token's queries by layer, and those ``asked`` at the end of a prompt, by position.
    """

    toy: Toy
    ids: list[int]
    pins: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    query: list[Tensor]
    asked: list[dict[int, Tensor]]
    kv: KVManager
    exact: bool


class FullReference:
    """Full mode attends to every token. ``run`` holds what is stored; ``p`` are the mode's parameters."""

    def __init__(self, run: Conversation, p: dict[str, Any]) -> None:
        self.run, self.p = run, p
        self.enter(len(run.ids))

    def enter(self, num_reachable: int) -> None:
        """Follow the mode's ``fill``; ``num_reachable`` tokens could be attended to before."""

    def reads(self, layer: int, query: Tensor) -> Tensor:
        """Return the tokens that the newest one attends to, bool ``[H, T]``; called once per layer and step."""
        return torch.ones(self.run.toy.geometry.kv_heads, len(self.run.ids), dtype=torch.bool)

    def keys(self, layer: int) -> Tensor:
        """Return the keys as attention sees them, ``[H, T, d_k]``."""
        return self.run.keys[layer]

    def others(self, layer: int, seen: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return logits ``[H_q, n]`` and values ``[H, n, d_v]`` that stand for tokens not ``seen [H, T]``, if any."""
        return None

    def tied(self, layer: int, head: int, token: int) -> bool:
        """Whether rounding may decide if the newest token attends to ``token``."""
        return False

    def end(self) -> None:
        """End the step."""


class StreamingReference(FullReference):
    """Algorithm 1: the list of kept positions, pruned after every step and prefill."""

    kept: list[int]

    def enter(self, num_reachable: int) -> None:
        sink, total = self.p["sink"], len(self.run.ids)
        recent = max(0, num_reachable - sink)
        self.kept = sorted({*range(min(sink, total)), *range(max(0, total - recent), total)})
        self._prune()

    def reads(self, layer: int, query: Tensor) -> Tensor:
        mask = torch.zeros(self.run.toy.geometry.kv_heads, len(self.run.ids), dtype=torch.bool)
        mask[:, [*self.kept, len(self.run.ids) - 1]] = True
        return mask

    def keys(self, layer: int) -> Tensor:
        """Return keys, each kept one rotated to its place in the compact cache, which ends with the newest."""
        keys, now = self.run.keys[layer].double().clone(), len(self.run.ids) - 1
        cache = sorted({*self.kept, *self.run.pins, now})
        by = torch.tensor([now - (len(cache) - 1) + place - position for place, position in enumerate(cache)])
        keys[:, cache] = rotated(keys[:, cache], self.run.toy.rotations[layer], by)
        return keys

    def end(self) -> None:
        self.kept.append(len(self.run.ids) - 1)
        self._prune()

    def _prune(self) -> None:
        c, r, length = self.p["budget"], self.p["R"], len(self.kept)
        if r == 0 or length <= c or length - c < r:
            return
        target = c
        if self.p["delta"]:
            target = min(max(length - self.p["delta"], c), c + self.p["sigma"])
        sink = self.p["sink"]
        self.kept = self.kept[:sink] + self.kept[len(self.kept) - (target - sink) :]


class Choice(NamedTuple):
    """The pages one KV head reads, best first, and the weights of all candidates."""

    pages: list[int]
    weights: dict[int, float]


class FreeKVReference(FullReference):
    """A bound or other index per page, softmax, mean over the group, top-k; one step ahead, corrected by cosine."""

    def enter(self, num_reachable: int) -> None:
        self.first = 1 if self.p["first_full"] else 0
        self.page = self.run.toy.geometry.page
        self.k = (self.p["budget"] - self.p["sink"] - self.p["window"]) // self.page
        layers = range(self.first, self.run.toy.geometry.layers)
        self.chosen = {layer: self._choose(layer, self.run.query[layer], len(self.run.ids)) for layer in layers}
        self.used: dict[int, list[Choice]] = {}
        self.corrections = 0

    def reads(self, layer: int, query: Tensor) -> Tensor:
        now = len(self.run.ids) - 1
        if layer < self.first:
            return super().reads(layer, query)
        heads = self.run.toy.geometry.kv_heads
        best = self._choose(layer, query, now)
        mask = torch.zeros(heads, now + 1, dtype=torch.bool)
        for head in range(heads):
            if self._needs_correction(query, self.run.query[layer], head):
                self.corrections += 1
                self.chosen[layer][head] = best[head]
            mask[head, : self.p["sink"]] = True
            mask[head, max(0, now + 1 - self.p["window"]) :] = True
            for page in self.chosen[layer][head].pages:
                low, high = max(page * self.page, self.p["sink"]), min((page + 1) * self.page, now + 1)
                mask[head, low:high] = True
        self.used[layer] = self.chosen[layer]
        self.chosen[layer] = self._choose(layer, query, now + 1)
        return mask

    def tied(self, layer: int, head: int, token: int) -> bool:
        choice = self.used[layer][head]
        last = choice.weights[choice.pages[-1]]
        return abs(choice.weights[token // self.page] - last) <= 1e-6 * last

    def _needs_correction(self, query: Tensor, last: Tensor, head: int) -> bool:
        if self.p["query"] == "own":
            return True
        group = self.run.toy.geometry.group
        cosines = []
        for q in range(head * group, (head + 1) * group):
            a, b = query[q].double(), last[q].double()
            cosines.append(float(a @ b) / max(1e-300, math.sqrt(float(a @ a) * float(b @ b))))
        return sum(cosines) / group < self.p["tau"]

    def _choose(self, layer: int, query: Tensor, position: int) -> list[Choice]:
        """Pages for the step at ``position``: candidates have a token between the sinks and that step's window."""
        geometry, sink, last = self.run.toy.geometry, self.p["sink"], position - self.p["window"]
        pages = [
            page
            for page in range(geometry.pages(len(self.run.ids)))
            if page * self.page <= last and (page + 1) * self.page > sink and last >= sink
        ]
        read_anyway = {*self.run.pins, *range(sink)}
        useful = [page for page in pages if not read_anyway.issuperset(range(page * self.page, (page + 1) * self.page))]
        if not useful or not self.k:
            return [Choice([], {}) for _ in range(geometry.kv_heads)]
        scaling = self.run.toy.specs[layer].scaling
        # The window is at least a page, so every candidate page is complete.
        keys = self.run.keys[layer][:, pages[0] * self.page : (pages[-1] + 1) * self.page].double()
        tiles = keys.unflatten(1, (len(pages), self.page))[:, [pages.index(page) for page in useful]]
        chosen = []
        for head in range(geometry.kv_heads):
            weights = torch.zeros(len(useful), dtype=torch.float64)
            for q in query[head * geometry.group : (head + 1) * geometry.group].double():
                weights += (scaling * self._score(q, tiles[head])).softmax(0)
            order = weights.argsort(descending=True).tolist()
            named = dict(zip(useful, weights.tolist(), strict=True))
            chosen.append(Choice([useful[i] for i in order[: self.k]], named))
        return chosen

    def _score(self, q: Tensor, tiles: Tensor) -> Tensor:
        """Unscaled scores ``[n]`` of pages of keys ``tiles [n, page, d_k]`` for one query head, by the index."""
        if self.p["index"] == "bounds":
            return torch.maximum(q * tiles.amax(1), q * tiles.amin(1)).sum(1)
        if self.p["index"] == "blocks":
            blocks = tiles.split(8, 1)
            bounds = torch.stack([torch.maximum(q * block.amax(1), q * block.amin(1)).sum(1) for block in blocks])
            means = torch.stack([block.mean(1) @ q for block in blocks])
            return (means + 0.25 * (bounds - means)).amax(0)
        scaling = self.run.toy.geometry.d_k**-0.5
        return ((coded(tiles, int((self.p["index"] or "bits2")[-1])) @ q) * scaling).logsumexp(1) / scaling


SIXTEEN = {torch.float32: torch.bfloat16, torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}


def coded(tiles: Tensor, bits: int, edge: torch.dtype = torch.bfloat16) -> Tensor:
    """Keys ``[..., page, d_k]`` in ``bits`` bits, by channel between lowest and highest, those rounded to ``edge``."""
    low, high = tiles.amin(-2, keepdim=True).to(edge).float(), tiles.amax(-2, keepdim=True).to(edge).float()
    steps = 2**bits - 1
    codes = ((tiles.float() - low) / (high - low)).nan_to_num(0).clamp(0, 1).mul(steps).round().double()
    return low.double() + codes * (high - low).double() / steps


class SpeculativeReference(FullReference):
    """The k tokens of highest weight by quantized keys, softmax, mean over the group; sinks and a window."""

    def enter(self, num_reachable: int) -> None:
        self.first = 1 if self.p["first_full"] else 0
        self.k = self.p["budget"] - self.p["sink"] - self.p["window"]
        self.weights: dict[tuple[int, int], Tensor] = {}
        self.bounds: dict[tuple[int, int], float] = {}

    def reads(self, layer: int, query: Tensor) -> Tensor:
        if layer < self.first:
            return super().reads(layer, query)
        geometry, now = self.run.toy.geometry, len(self.run.ids) - 1
        spec = self.run.toy.specs[layer]
        asks = self.asked = self.run.query[layer] if self.p["query"] == "last" else query
        seen = 0 if spec.window is None else max(0, now + 1 - spec.window)
        low, high = max(self.p["sink"], seen), now - self.p["window"]
        mask = torch.zeros(geometry.kv_heads, now + 1, dtype=torch.bool)
        mask[:, :low] = mask[:, max(0, high + 1) :] = True
        may = [token for token in range(low, high + 1) if token not in self.run.pins]
        for head in range(geometry.kv_heads if may and self.k else 0):
            keys = self.run.keys[layer][head, : now // geometry.page * geometry.page].double()
            kept = coded(keys.view(-1, geometry.page, geometry.d_k), int((self.p["index"] or "bits2")[-1])).flatten(
                0, 1
            )
            weights = torch.zeros(len(kept), dtype=torch.float64)
            for q in asks[head * geometry.group : (head + 1) * geometry.group].double():
                weights[seen:] += (spec.scaling * kept[seen:] @ q).softmax(0)
            each = weights.tolist()
            ranked = sorted(may, key=lambda token, each=each: -each[token])
            mask[head, ranked[: self.k]] = True
            self.weights[layer, head] = weights
            self.bounds[layer, head] = float(weights[ranked[: self.k][-1]])
        return mask

    def others(self, layer: int, seen: Tensor) -> tuple[Tensor, Tensor] | None:
        """By quantized keys, corrected for weighing too much on average, each with its page's mean value."""
        geometry, spec = self.run.toy.geometry, self.run.toy.specs[layer]
        if self.p["rest"] == "none" or not self.k or layer < self.first or spec.softcap is not None:
            return None
        now = len(self.run.ids) - 1
        known, visible = now // geometry.page * geometry.page, now - spec.window if spec.window is not None else -1
        if not known:
            return None
        logits, values, bits = [], [], int((self.p["index"] or "bits2")[-1])
        for head in range(geometry.kv_heads):
            tiles = self.run.keys[layer][head, :known].view(-1, geometry.page, geometry.d_k)
            asks = self.asked[head * geometry.group : (head + 1) * geometry.group].double() * spec.scaling
            edge = SIXTEEN[tiles.dtype]
            steps = tiles.amax(1).to(edge).double() - tiles.amin(1).to(edge).double()
            variance = (asks[:, None] * (steps / (2**bits - 1))).square().sum(-1) / 12  # [group, pages]
            of_pages = asks @ coded(tiles.double(), bits, edge).flatten(0, 1).T
            of_pages -= variance.repeat_interleave(geometry.page, 1) / 2
            logits.append(of_pages.masked_fill(seen[head, :known] | (torch.arange(known) <= visible), -torch.inf))
            # In the precision of the modes: its last bit decides how a value between two 16-bit numbers is rounded.
            pages = self.run.values[layer][head, :known].view(-1, geometry.page, geometry.d_v)
            means = pages.mean(1, dtype=torch.float32)
            values.append(means.to(SIXTEEN[tiles.dtype]).double().repeat_interleave(geometry.page, 0))
        return torch.cat(logits), torch.stack(values)

    def tied(self, layer: int, head: int, token: int) -> bool:
        last = self.bounds[layer, head]
        return abs(float(self.weights[layer, head][token]) - last) <= 2e-5 * last


SYNC_SINK = 4


class SyncReference(FullReference):
    """SyncKV: static and dynamic sets by the leading head's attention, equations 3 to 8, with a ring of w tokens."""

    def enter(self, num_reachable: int) -> None:
        self.t, self.used = 0, {}
        self.sinks = 0 if self.p["profile"] == "paper" else SYNC_SINK
        geometry = self.run.toy.geometry
        heads, clusters = geometry.kv_heads, self.p["clusters"]
        self.window = max(1, min(128, (self.p["budget"] - self.sinks) // 2 - (self.p["m"] - 1)))
        self.k = self.p["budget"] - (self.window + self.p["m"] - 1)
        self.dynamic_share = min(self.k - self.sinks, self.k - math.ceil(Decimal(str(self.p["rho"])) * self.k))
        self.region = geometry.round_up(self.k - self.sinks + self.dynamic_share)
        retrieval = calibration(geometry).retrieval
        self.groups = {
            layer: {
                max(members, key=lambda head: retrieval[layer][head]): members
                for members in _runs(heads, min(clusters, heads))
            }
            for layer in range(geometry.layers)
        }
        self.sets = {layer: {r: self._first(layer, r) for r in groups} for layer, groups in self.groups.items()}
        self.kept_from = dict.fromkeys(self.groups, len(self.run.ids) + 1 - self.window)

    def reads(self, layer: int, query: Tensor) -> Tensor:
        if layer == 0:
            self.t += 1
        now = len(self.run.ids) - 1
        mask = torch.zeros(self.run.toy.geometry.kv_heads, now + 1, dtype=torch.bool)
        for leader, members in self.groups[layer].items():
            static, dynamic = self.sets[layer][leader]
            for head in members:
                mask[head, : self.sinks if head != leader else now + 1] = True
                mask[head, [*static, *dynamic]] = True
                mask[head, max(0, self.kept_from[layer]) :] = True
        if self.t % self.p["m"] == 0:
            self.kept_from[layer] = now + 2 - self.window
            for leader, (static, dynamic) in self.sets[layer].items():
                ranked = [x for x in self._ranked(layer, leader, query) if x not in static]
                self.sets[layer][leader] = static, self._admitted(ranked, static, dynamic)
        return mask

    def _first(self, layer: int, leader: int) -> tuple[list[int], list[int]]:
        best = self._ranked(layer, leader, self.run.query[layer])[: self.k - self.sinks]
        share = self.k - self.sinks - self.dynamic_share
        return best[:share], best[share:]

    def _admitted(self, ranked: list[int], static: list[int], dynamic: list[int]) -> list[int]:
        """Return the best tokens; those to be recalled are limited by the free slots."""
        wanted = ranked[: self.k - self.sinks - len(static)]
        fetched = [x for x in wanted if x not in dynamic][: self.region - len(static) - len(dynamic)]
        return [x for x in wanted if x in dynamic or x in fetched]

    def _ranked(self, layer: int, leader: int, query: Tensor) -> list[int]:
        """Tokens between the sinks and the next step's ring, and in its sight, by the last token's attention."""
        toy, total = self.run.toy, len(self.run.ids)
        spec, group = toy.specs[layer], toy.geometry.group
        sight = total - spec.window if spec.window else -1
        last, keys = total - self.window, self.run.keys[layer]
        if last < self.sinks:
            return []
        mask = torch.arange(total) >= sight
        every = mask.expand(toy.geometry.kv_heads, total)
        weights = softmax(query, keys, every, spec)[leader * group : (leader + 1) * group].amax(0)
        may = {x for x in range(self.sinks, last + 1) if x > sight and x not in self.run.pins}
        return [x for x in weights.argsort(descending=True).tolist() if x in may]


def _runs(heads: int, clusters: int) -> list[range]:
    """Divide the heads into ``clusters`` runs of neighbors."""
    return [range(c * heads // clusters, (c + 1) * heads // clusters) for c in range(clusters)]
