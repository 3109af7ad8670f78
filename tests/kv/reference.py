"""An independent reference for the KV modes: dense attention in float64 under an explicit set of tokens.

Nothing here is taken from the modes: the sets follow the papers (Lazy Pruning/Slack/Max_Drop, Algorithm 1; FreeKV,
sections 3.2 and 3.3) in plain loops, keys are rotated with complex numbers from their content. A new mode is one more
class in ``REFERENCES`` and one more row in the tests' tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvchat.kv.facts import LayerFacts
from kvchat.kv.geometry import Geometry
from kvchat.kv.heads import Calibration
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.rope import Rotation
from kvchat.kv.store import Store
from kvchat.parameters import parse

CPU = torch.device("cpu")
CONTEXT = 8192
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


# ---- a model without a model


@dataclass(frozen=True)
class Toy:
    """Layers that do not depend on each other: token id -> content of q, k, v ``[layers, heads, ids, d]`` (float64).

    ``plain`` layers have no window, cap or learned sinks; neighbouring ids have similar queries, in some heads more
    than in others, so that a correction threshold flags some heads and not others.
    """

    geometry: Geometry
    facts: tuple[LayerFacts, ...]
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

    def facts(kind: str) -> LayerFacts:
        extra = dict(KINDS[kind])
        if "sinks" in extra:
            extra["sinks"] = torch.randn(geometry.q_heads, generator=random).to(dtype)
        return LayerFacts(d_k**-0.5, **extra)

    def content(heads: int, d: int) -> Tensor:
        return torch.randn(len(kinds), heads, ids, d, generator=random, dtype=torch.float64)

    queries = content(geometry.q_heads, d_k)
    stay = torch.linspace(0.6, 0.99, geometry.q_heads, dtype=torch.float64)[:, None]
    for i in range(1, ids):
        queries[:, :, i] = stay * queries[:, :, i - 1] + (1 - stay**2).sqrt() * queries[:, :, i]
    contents = (queries, 1.5 * content(kv_heads, d_k), content(kv_heads, d_v))
    rotations = tuple(None if kind == "unrotated" else rotation for kind in kinds)
    return Toy(geometry, tuple(facts(kind) for kind in kinds), rotations, contents)


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


def dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, facts: LayerFacts) -> Tensor:
    """Attention of one token in float64: ``query [H_q, d_k]``, ``mask`` bool ``[H, T]`` -> ``[H_q, d_v]``."""
    group = query.shape[0] // keys.shape[0]
    keys, values, mask = (x.repeat_interleave(group, 0) for x in (keys.double(), values.double(), mask))
    logits = facts.scaling * (keys @ query.double()[:, :, None])[:, :, 0]
    if facts.softcap is not None:
        logits = facts.softcap * torch.tanh(logits / facts.softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if facts.sinks is not None:
        logits = torch.cat((logits, facts.sinks.double()[:, None]), 1)
    weights = logits.softmax(1)[:, : keys.shape[1]]
    return (weights[:, None] @ values)[:, 0]


# ---- the sets, mode by mode


class FullReference:
    """Everything is read. ``run`` holds what is stored; ``p`` are the mode's parameters."""

    def __init__(self, run: Run, p: dict[str, Any]) -> None:
        self.run, self.p = run, p
        self.enter(len(run.ids))

    def enter(self, cached: int) -> None:
        """The mode filled its slots; ``cached`` tokens could be read before."""

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

    def enter(self, cached: int) -> None:
        self.evicted = 0
        sink, total = self.p["sink"], len(self.run.ids)
        recent = max(0, cached - sink)
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

    def enter(self, cached: int) -> None:
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
            if self._turned(query, self.run.query[layer], head):
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

    def _turned(self, query: Tensor, last: Tensor, head: int) -> bool:
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
        scaling = self.run.toy.facts[layer].scaling
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
    """Neighbouring heads are alike, clusters are runs of neighbours; ``SyncReference`` tells who leads."""
    heads = range(geometry.kv_heads)
    similarity = tuple(tuple(1 - abs(a - b) / 8 for b in heads) for a in heads)
    retrieval = tuple(tuple(((7 * head + 3 * layer) % 5) / 5 for head in heads) for layer in range(geometry.layers))
    return Calibration("toy", "nothing", 1, (similarity,) * geometry.layers, retrieval)


class SyncReference(FullReference):
    """SyncKV: static and dynamic sets by the leading head's attention, equations 3 to 8, with a ring of w tokens."""

    def enter(self, cached: int) -> None:
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
        facts, group = toy.facts[layer], toy.geometry.group
        sight = total - (facts.window or total)
        last, keys = total - self.p["window"], self.run.keys[layer]
        if last < SYNC_SINK:
            return []
        mask = torch.arange(total) >= sight
        one = torch.eye(total, dtype=torch.float64).expand(toy.geometry.kv_heads, total, total)
        every = mask.expand(toy.geometry.kv_heads, total)
        weights = dense(query, keys, one, every, facts)[leader * group : (leader + 1) * group].amax(0)
        return [x for x in weights.argsort(descending=True).tolist() if SYNC_SINK <= x <= last and x > sight]


def _runs(heads: int, clusters: int) -> list[range]:
    """Heads in as many runs of neighbours."""
    return [range(c * heads // clusters, (c + 1) * heads // clusters) for c in range(clusters)]


REFERENCES: dict[str, type[FullReference]] = {
    "full": FullReference,
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
        cached = self.store.mode.cached()
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
        with self.store.step():
            outputs = [self.store.attention(i, *new[i], self.toy.facts[i])[:, 0] for i in layers]
        self.ids += ids
        for layer in layers:
            q, k, v = new[layer]
            self._keep(layer, k, v)
            self._check_step(layer, q[:, 0], outputs[layer])
            self.query[layer] = q[:, 0]
        self.reference.end()
        return outputs

    def _check_step(self, layer: int, query: Tensor, output: Tensor) -> None:
        facts, total = self.toy.facts[layer], len(self.ids)
        where = f"{self.store.mode.name}, layer {layer}, token {total - 1}"
        mask = self.reference.reads(layer, query)
        if facts.window is not None:
            mask = mask & (torch.arange(total) > total - 1 - facts.window)
        seen = self.store.attended(layer)
        if self.exact:
            for head, token in (seen != mask).nonzero().tolist():
                does = "reads" if seen[head, token] else "does not read"
                assert self.reference.tied(layer, head, token), f"{where}: head {head} {does} token {token}"
        expected = dense(query, self.reference.keys(layer), self.values[layer], seen, facts)
        assert_near(output, expected, self.toy.geometry.dtype, where)

    def _prefill_layer(self, layer: int, ids: list[int], start: int) -> None:
        facts = self.toy.facts[layer]
        q, k, v = self.toy.qkv(layer, ids, start)
        output = self.store.attention(layer, q, k, v, facts)
        self._keep(layer, k, v)
        self.query[layer] = q[:, -1]
        for i in {0, len(ids) // 2, len(ids) - 1}:
            positions = torch.arange(start + len(ids))
            mask = (positions <= start + i) & (positions > start + i - (facts.window or start + i + 1))
            every = mask.expand(self.toy.geometry.kv_heads, -1)
            expected = dense(q[:, i], self.keys[layer], self.values[layer], every, facts)
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
        self.reference = REFERENCES[mode.name](self, mode.resolved())


def assert_near(output: Tensor, expected: Tensor, dtype: torch.dtype, where: str) -> None:
    tolerance = TOLERANCE[dtype]
    error = float((output.double() - expected).abs().max())
    assert error <= tolerance, f"{where}: off by {error:.2g}, allowed {tolerance:.2g}"
