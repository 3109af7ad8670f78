"""An independent reference for the KV modes: dense attention in float64 under an explicit set of tokens.

Nothing here is taken from the modes: the sets follow the papers (Lazy Pruning/Slack/Max_Drop, Algorithm 1; FreeKV,
sections 3.2 and 3.3; SyncKV, equations 3 to 8; ASR-KF-EGR, Algorithm 1) in plain loops, keys are rotated with complex
numbers from their content. A new mode is one more class in ``REFERENCES`` and one more row in the tests' tables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvchat.config.modes import parse
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import Store
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.freeze import RESIZE_INTERVAL
from kvchat.kv.modes.sync_heads import Calibration
from kvchat.kv.rope import Rotation

CPU = torch.device("cpu")
CONTEXT = 8192
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


# ---- a model without a model


@dataclass(frozen=True)
class Toy:
    """Layers that do not depend on each other: token id -> content of q, k, v ``[layers, heads, ids, d]`` (float64).

    ``plain`` layers have no window, cap or learned sinks; neighboring ids have similar queries, in some heads more
    than in others, so that a correction threshold flags some heads and not others.
    """

    geometry: Geometry
    specs: tuple[AttentionSpec, ...]
    rotations: tuple[Rotation | None, ...]
    contents: tuple[Tensor, Tensor, Tensor]

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(CONTEXT, self.rotations, None, calibration(self.geometry))

    def qkv(self, layer: int, ids: list[int], start: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the layer's projections give for tokens ``ids`` from position ``start`` on."""
        positions = torch.arange(start, start + len(ids))
        q, k, v = (content[layer][:, ids] for content in self.contents)
        q, k = (rotated(x, self.rotations[layer], positions) for x in (q, k))
        dtype = self.geometry.dtype
        return q.to(dtype), k.to(dtype), v.to(dtype)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 24},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "unrotated": {},
}


def toy(
    kinds: tuple[str, ...] = ("plain", "plain", "plain"),
    *,
    kv_heads: int = 2,
    group: int = 2,
    d_k: int = 16,
    d_v: int = 16,
    page: int = 32,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    ids: int = 1024,
    seed: int = 0,
) -> Toy:
    geometry = Geometry(len(kinds), kv_heads * group, kv_heads, d_k, d_v, dtype, page)
    random = torch.Generator().manual_seed(seed)
    freq = 100.0 ** -(torch.arange(d_k // 4, dtype=torch.float64) / (d_k // 4))
    rotation = Rotation(freq, interleaved, offset=d_k // 4)

    def spec(kind: str) -> AttentionSpec:
        extra = dict(KINDS[kind])
        if "sinks" in extra:
            extra["sinks"] = torch.randn(geometry.q_heads, generator=random).to(dtype)
        return AttentionSpec(d_k**-0.5, **extra)

    def content(heads: int, d: int) -> Tensor:
        return torch.randn(len(kinds), heads, ids, d, generator=random, dtype=torch.float64)

    queries = content(geometry.q_heads, d_k)
    stay = torch.linspace(0.6, 0.99, geometry.q_heads, dtype=torch.float64)[:, None]
    for i in range(1, ids):
        queries[:, :, i] = stay * queries[:, :, i - 1] + (1 - stay**2).sqrt() * queries[:, :, i]
    contents = (queries, 1.5 * content(kv_heads, d_k), content(kv_heads, d_v))
    rotations = tuple(None if kind == "unrotated" else rotation for kind in kinds)
    return Toy(geometry, tuple(spec(kind) for kind in kinds), rotations, contents)


def rotated(x: Tensor, rotation: Rotation | None, positions: Tensor) -> Tensor:
    """The textbook: ``x [..., n, d]`` (any dtype) at ``positions [n]``; every pair times e^(i·position·frequency)."""
    if rotation is None:
        return x.double()
    half, low = len(rotation.inv_freq), rotation.offset
    out = x.double().clone()
    turning = out[..., low : low + 2 * half]
    if rotation.interleaved:
        pairs = torch.complex(turning[..., 0::2], turning[..., 1::2])
    else:
        pairs = torch.complex(turning[..., :half], turning[..., half:])
    angle = positions.double()[:, None] * rotation.inv_freq
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    if rotation.interleaved:
        out[..., low : low + 2 * half] = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        out[..., low : low + 2 * half] = torch.cat((pairs.real, pairs.imag), -1)
    return out


def dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of one token in float64: ``query [H_q, d_k]``, ``mask`` bool ``[H, T]`` -> ``[H_q, d_v]``."""
    values = values.double().repeat_interleave(len(query) // len(values), 0)
    return (softmax(query, keys, mask, spec)[:, None] @ values)[:, 0]


def softmax(query: Tensor, keys: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """The weights of ``dense``, ``[H_q, T]``."""
    group = query.shape[0] // keys.shape[0]
    keys, mask = (x.repeat_interleave(group, 0) for x in (keys.double(), mask))
    logits = spec.scaling * (keys @ query.double()[:, :, None])[:, :, 0]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if spec.sinks is not None:
        logits = torch.cat((logits, spec.sinks.double()[:, None]), 1)
    return logits.softmax(1)[:, : keys.shape[1]]


# ---- the sets, mode by mode


class FullReference:
    """Everything is read. ``run`` holds what is stored; ``p`` are the mode's parameters."""

    def __init__(self, run: Run, p: dict[str, Any]) -> None:
        self.run, self.p = run, p
        self.enter(len(run.ids))

    def enter(self, num_reachable: int) -> None:
        """The mode filled its slots; ``num_reachable`` tokens could be read before."""

    def reads(self, layer: int, query: Tensor) -> Tensor:
        """Tokens that the newest one reads, bool ``[H, T]``; called once a layer and step."""
        return torch.ones(self.run.toy.geometry.kv_heads, len(self.run.ids), dtype=torch.bool)

    def keys(self, layer: int) -> Tensor:
        """Keys as attention sees them, ``[H, T, d_k]``."""
        return self.run.keys[layer]

    def tied(self, layer: int, head: int, token: int) -> bool:
        """May rounding decide whether the newest token reads ``token``?"""
        return False

    def end(self) -> None:
        """The step is over."""


class StreamingReference(FullReference):
    """Algorithm 1: the list of kept positions, pruned after every step and prefill."""

    kept: list[int]

    def enter(self, num_reachable: int) -> None:
        self.evicted = 0
        sink, total = self.p["sink"], len(self.run.ids)
        recent = max(0, num_reachable - sink)
        self.kept = sorted({*range(min(sink, total)), *range(max(0, total - recent), total)})
        self._prune()

    def reads(self, layer: int, query: Tensor) -> Tensor:
        mask = torch.zeros(self.run.toy.geometry.kv_heads, len(self.run.ids), dtype=torch.bool)
        mask[:, [*self.kept, len(self.run.ids) - 1]] = True
        return mask

    def keys(self, layer: int) -> Tensor:
        """The compact cache: sinks directly before the first kept recent token; everyone else where they were."""
        keys, sink = self.run.keys[layer].double().clone(), self.p["sink"]
        recents = [position for position in self.kept if position >= sink]
        first = recents[0] if recents else len(self.run.ids) - 1
        n = min(sink, len(self.run.ids))
        if first > n:
            by = torch.full((n,), first - n)
            keys[:, :n] = rotated(keys[:, :n], self.run.toy.rotations[layer], by)
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


class SpeculativeReference(FullReference):
    """Quest's bound per page, softmax, mean over the group, top-k; chosen one step ahead, corrected by cosine."""

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
        if not pages or not self.k:
            return [Choice([], {}) for _ in range(geometry.kv_heads)]
        scaling = self.run.toy.specs[layer].scaling
        # The window is at least a page, so every candidate page is complete.
        keys = self.run.keys[layer][:, pages[0] * self.page : (pages[-1] + 1) * self.page].double()
        tiles = keys.unflatten(1, (len(pages), self.page))
        highest, lowest = tiles.amax(2), tiles.amin(2)
        chosen = []
        for head in range(geometry.kv_heads):
            weights = torch.zeros(len(pages), dtype=torch.float64)
            for q in query[head * geometry.group : (head + 1) * geometry.group].double():
                weights += (scaling * torch.maximum(q * highest[head], q * lowest[head]).sum(1)).softmax(0)
            order = weights.argsort(descending=True).tolist()
            named = dict(zip(pages, weights.tolist(), strict=True))
            chosen.append(Choice([pages[i] for i in order[: self.k]], named))
        return chosen


SYNC_SINK = 4


def calibration(geometry: Geometry) -> Calibration:
    """Neighboring heads are alike, clusters are runs of neighbors; ``SyncReference`` tells who leads."""
    heads = range(geometry.kv_heads)
    similarity = tuple(tuple(1 - abs(a - b) / 8 for b in heads) for a in heads)
    retrieval = tuple(tuple(((7 * head + 3 * layer) % 5) / 5 for head in heads) for layer in range(geometry.layers))
    return Calibration("toy", "nothing", 1, (similarity,) * geometry.layers, retrieval)


class SyncReference(FullReference):
    """SyncKV: static and dynamic sets by the leading head's attention, equations 3 to 8, with a ring of w tokens."""

    def enter(self, num_reachable: int) -> None:
        self.t, self.used = 0, {}
        geometry = self.run.toy.geometry
        heads, clusters = geometry.kv_heads, self.p["clusters"]
        self.k = self.p["budget"] - (self.p["window"] + self.p["m"] - 1)
        self.dynamic_share = min(self.k - SYNC_SINK, math.floor((1 - self.p["rho"]) * self.k))
        self.region = geometry.round_up(self.k - SYNC_SINK + self.dynamic_share)
        retrieval = calibration(geometry).retrieval
        self.groups = {
            layer: {
                max(members, key=lambda head: retrieval[layer][head]): members
                for members in _runs(heads, min(clusters, heads))
            }
            for layer in range(geometry.layers)
        }
        self.sets = {layer: {r: self._first(layer, r) for r in groups} for layer, groups in self.groups.items()}
        self.kept_from = dict.fromkeys(self.groups, len(self.run.ids) + 1 - self.p["window"])

    def reads(self, layer: int, query: Tensor) -> Tensor:
        if layer == 0:
            self.t += 1
        now = len(self.run.ids) - 1
        mask = torch.zeros(self.run.toy.geometry.kv_heads, now + 1, dtype=torch.bool)
        for leader, members in self.groups[layer].items():
            static, dynamic = self.sets[layer][leader]
            for head in members:
                mask[head, : SYNC_SINK if head != leader else now + 1] = True
                mask[head, [*static, *dynamic]] = True
                mask[head, max(0, self.kept_from[layer]) :] = True
        if self.t % self.p["m"] == (layer % self.p["m"] if self.p["staggered"] else 0):
            self.kept_from[layer] = now + 2 - self.p["window"]
            for leader, (static, dynamic) in self.sets[layer].items():
                ranked = [x for x in self._ranked(layer, leader, query) if x not in static]
                self.sets[layer][leader] = static, self._admitted(ranked, static, dynamic)
        return mask

    def _first(self, layer: int, leader: int) -> tuple[list[int], list[int]]:
        best = self._ranked(layer, leader, self.run.query[layer])[: self.k - SYNC_SINK]
        share = self.k - SYNC_SINK - self.dynamic_share
        return best[:share], best[share:]

    def _admitted(self, ranked: list[int], static: list[int], dynamic: list[int]) -> list[int]:
        """The best, as far as those to be fetched find empty slots."""
        wanted = ranked[: self.k - SYNC_SINK - len(static)]
        fetched = [x for x in wanted if x not in dynamic][: self.region - len(static) - len(dynamic)]
        return [x for x in wanted if x in dynamic or x in fetched]

    def _ranked(self, layer: int, leader: int, query: Tensor) -> list[int]:
        """Tokens between the sinks and the next step's ring and in its sight, by the last token's attention."""
        toy, total = self.run.toy, len(self.run.ids)
        spec, group = toy.specs[layer], toy.geometry.group
        sight = total - (spec.window or total)
        last, keys = total - self.p["window"], self.run.keys[layer]
        if last < SYNC_SINK:
            return []
        mask = torch.arange(total) >= sight
        every = mask.expand(toy.geometry.kv_heads, total)
        weights = softmax(query, keys, every, spec)[leader * group : (leader + 1) * group].amax(0)
        return [x for x in weights.argsort(descending=True).tolist() if SYNC_SINK <= x <= last and x > sight]


def _runs(heads: int, clusters: int) -> list[range]:
    """Heads in as many runs of neighbors."""
    return [range(c * heads // clusters, (c + 1) * heads // clusters) for c in range(clusters)]


def best(rank: dict[int, float], n: int, theirs: Set[int]) -> set[int]:
    """The ``n`` tokens of the lowest ``rank``; of those that rounding cannot tell apart rather ``theirs``."""
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
    token has still to stay away (0 or less: it waits for room to return). ``theirs`` are the tokens that the store has
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
        """After the newest token's attention, which read the tokens of ``scores``; ``room`` tokens may be active."""
        leaving = self._leaving(scores, theirs)
        for j, s in scores.items():
            self.c[j], self.score[j] = self._count(j, s), s
        steps = {j: self._steps(self.c[j]) for j in leaving}
        if self.p["same_step"]:  # one that were to leave and return at once does not move
            steps = {j: n - 1 for j, n in steps.items()}
        self.d = {j: n - 1 for j, n in self.d.items()} | {j: max(n, 1) for j, n in steps.items()}
        self._return(room, theirs)

    def enter(self, total: int, scores: Callable[[], dict[int, float]], theirs: Set[int], new: bool) -> None:
        """The conversation has ``total`` tokens now, ``new`` ones among them; ``scores`` by the last one's queries."""
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
        """May the token be frozen?"""
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
        """Those flagged often enough, and more where the ceiling asks for it, down to the floor."""
        p, least = self.p, 1 + self.p["same_step"]
        may = {j: s for j, s in scores.items() if self._may(j)}
        flagged = {j: s for j, s in may.items() if s < p["tau"] and self._steps(self._count(j, s)) >= least}
        others = {j: s for j, s in may.items() if j not in flagged}
        over = len(scores) + 1 - p["max_active"] if p["max_active"] else 0
        n = min(max(len(flagged), over), len(scores) - p["min_active"])
        return best(flagged, n, theirs) | best(others, n - len(flagged), theirs)

    def _return(self, room: float, theirs: Set[int]) -> None:
        """Those whose time is over return, the most relevant and longest waiting first, as far as there is room."""
        waiting = {j: -(self.score.get(j, 0.0) + 0.01) * (1 - n) for j, n in self.d.items() if n <= 0}
        n = min(len(waiting), self.p["moves"], max(0, room - len(self.active())))
        for j in best(waiting, int(n), set(range(self.total)) - theirs):
            del self.d[j]


class FreezeReference(FullReference):
    """ASR-KF-EGR: a simulation for all layers together, or one a layer.

    The store's own scores, once found right to rounding, decide whether a token is flagged, so that rounding never
    does. How many slots there are is the store's business as well: returning tokens fit in or wait.
    """

    def __init__(self, run: Run, p: dict[str, Any]) -> None:
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
            room = self.run.store.slots[i].n - RESIZE_INTERVAL
            if self.p["max_active"]:
                room = min(room, self.p["max_active"] - 1)
            simulation.step(self._scores(i, simulation.active(), simulation.score), room, self._theirs(i))

    def _theirs(self, i: int) -> set[int]:
        return set(self.run.store.mode.timers[i].frozen[: len(self.run.ids)].nonzero().flatten().tolist())

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
        theirs = self.run.store.mode.timers[i].score[: len(self.run.ids)].double()
        if self.run.exact:
            torch.testing.assert_close(theirs[mask[0]], scores[mask[0]], atol=1e-5, rtol=1e-4)
        return {j: float(theirs[j]) for j in tokens}

    def _relevance(self, layer: int, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``[T]`` of the tokens in ``mask`` and in sight of the newest one, 0 elsewhere; which are in sight."""
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


REFERENCES: dict[str, type[FullReference]] = {
    "full": FullReference,
    "freeze": FreezeReference,
    "streaming": StreamingReference,
    "sync": SyncReference,
    "speculative": SpeculativeReference,
}


# ---- a conversation, checked at every token


class Run:
    """Drives a store with a ``Toy`` and holds every output and every set against the reference.

    ``exact`` is off for half precision, whose page scores may rank close pages otherwise: the sets are then the
    store's own, and outputs are compared under them.
    """

    def __init__(self, made: Toy, mode: str, **params: Any) -> None:
        self.toy = made
        self.exact = made.geometry.dtype is torch.float32
        self.ids: list[int] = []
        self.fresh = 0
        g = made.geometry
        self.keys = [torch.empty(g.kv_heads, 0, g.d_k, dtype=g.dtype) for _ in range(g.layers)]
        self.values = [torch.empty(g.kv_heads, 0, g.d_v, dtype=g.dtype) for _ in range(g.layers)]
        self.query = [torch.zeros(g.q_heads, g.d_k, dtype=g.dtype) for _ in range(g.layers)]
        self.store = Store(g, CPU, self.mode(mode, **params))
        self._refer()

    def mode(self, mode: str, **params: Any) -> Any:
        return build(parse(mode, params), self.toy.geometry, self.toy.traits)

    # ---- what a session does

    def prefill(self, n: int, chunk: int = 1000) -> None:
        cached = self.store.mode.num_reachable()
        for low in range(0, n, chunk):
            ids = self._new_ids(min(chunk, n - low))
            start = len(self.ids)
            with self.store.prefill(len(ids)):
                for layer in range(self.toy.geometry.layers):
                    self._prefill_layer(layer, ids, start)
            self.ids += ids
        self.store.settle(cached + n)
        self.reference.enter(cached + n)

    def store_only(self, n: int) -> None:
        """``n`` tokens stored as by a prefill, without its attention (which is quadratic)."""
        ids = self._new_ids(n)
        self.store.host.reserve(n)
        for layer in range(self.toy.geometry.layers):
            q, k, v = self.toy.qkv(layer, ids, 0)
            self.store.host.append(layer, 0, k, v)
            self.store.query[layer] = self.query[layer] = q[:, -1]
            self._keep(layer, k, v)
        self.ids += ids
        self.store.host.total = n
        self.store.settle()
        self.reference.enter(n)

    def step(self, n: int = 1) -> list[Tensor]:
        """``n`` decode steps; the last one's outputs, one ``[H_q, d_v]`` a layer."""
        outputs: list[Tensor] = []
        for _ in range(n):
            outputs = self._step(self._new_ids(1))
        return outputs

    def switch(self, mode: str, **params: Any) -> int:
        moved = self.store.switch(self.mode(mode, **params))
        self._refer()
        return moved

    def truncate(self, n: int) -> None:
        self.store.truncate(n)
        del self.ids[n:]
        self.keys = [keys[:, :n] for keys in self.keys]
        self.values = [values[:, :n] for values in self.values]
        self.reference.enter(len(self.ids))

    # ---- checks

    def check(self) -> None:
        """Everything stored is what was projected, bit for bit; slots agree with it."""
        assert self.store.total == len(self.ids)
        self.store.check_integrity()
        for layer in range(self.toy.geometry.layers):
            keys, values = self.store.host.dense(layer, self.store.total)
            assert torch.equal(keys, self.keys[layer]), f"stored keys of layer {layer}"
            assert torch.equal(values, self.values[layer]), f"stored values of layer {layer}"

    def _step(self, ids: list[int]) -> list[Tensor]:
        layers = range(self.toy.geometry.layers)
        new = [self.toy.qkv(layer, ids, len(self.ids)) for layer in layers]
        with self.store.step(), self.store.layers():
            outputs = [self.store.attention(i, *new[i], self.toy.specs[i])[:, 0] for i in layers]
        self.ids += ids
        for layer in layers:
            q, k, v = new[layer]
            self._keep(layer, k, v)
            self._check_step(layer, q[:, 0], outputs[layer])
            self.query[layer] = q[:, 0]
        self.reference.end()
        return outputs

    def _check_step(self, layer: int, query: Tensor, output: Tensor) -> None:
        spec, total = self.toy.specs[layer], len(self.ids)
        where = f"{self.store.mode.name}, layer {layer}, token {total - 1}"
        mask = self.reference.reads(layer, query)
        if spec.window is not None:
            mask = mask & (torch.arange(total) > total - 1 - spec.window)
        seen = self.store.attended(layer)
        if self.exact:
            for head, token in (seen != mask).nonzero().tolist():
                does = "reads" if seen[head, token] else "does not read"
                assert self.reference.tied(layer, head, token), f"{where}: head {head} {does} token {token}"
        expected = dense(query, self.reference.keys(layer), self.values[layer], seen, spec)
        assert_near(output, expected, self.toy.geometry.dtype, where)

    def _prefill_layer(self, layer: int, ids: list[int], start: int) -> None:
        spec = self.toy.specs[layer]
        q, k, v = self.toy.qkv(layer, ids, start)
        output = self.store.attention(layer, q, k, v, spec)
        self._keep(layer, k, v)
        self.query[layer] = q[:, -1]
        for i in {0, len(ids) // 2, len(ids) - 1}:
            positions = torch.arange(start + len(ids))
            mask = (positions <= start + i) & (positions > start + i - (spec.window or start + i + 1))
            every = mask.expand(self.toy.geometry.kv_heads, -1)
            expected = dense(q[:, i], self.keys[layer], self.values[layer], every, spec)
            assert_near(output[:, i], expected, self.toy.geometry.dtype, f"prefill, layer {layer}, token {start + i}")

    # ---- inside

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.keys[layer] = torch.cat((self.keys[layer], k), 1)
        self.values[layer] = torch.cat((self.values[layer], v), 1)

    def _new_ids(self, n: int) -> list[int]:
        """Ids never used before, so that what is written anew after a truncation differs from what was there."""
        count = self.toy.contents[0].shape[2]
        self.fresh += n
        return [i % count for i in range(self.fresh - n, self.fresh)]

    def _refer(self) -> None:
        mode = self.store.mode
        self.reference = REFERENCES[mode.name](self, mode.effective_params())


def assert_near(output: Tensor, expected: Tensor, dtype: torch.dtype, where: str) -> None:
    tolerance = TOLERANCE[dtype]
    error = float((output.double() - expected).abs().max())
    assert error <= tolerance, f"{where}: off by {error:.2g}, allowed {tolerance:.2g}"
