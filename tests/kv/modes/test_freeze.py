"""The freeze mode against the paper's numbers and a simulation in plain Python, written from the definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import Simulation

from kvchat.config.modes import parse
from kvchat.errors import UsageError
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import Store
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.recovery_levels import LEVELS

LAYERS, HEADS, GROUP, D = 2, 2, 2, 8
MEAN = {"score": "prob_rel", "smooth": 0.0, "k": 2.0}  # the paper's timers, and the mean over the heads
EVERYTHING = {"min_active": 0, "stagger": 1, "tau": 1e9, **MEAN}


def spec(layer: int, windowed: bool) -> AttentionSpec:
    return AttentionSpec(scaling=1.0, window=24 if windowed and layer else None)


class Run:
    """A store in freeze mode, decoding random K/V of two independent layers; ``strength`` makes attention peaked."""

    def __init__(self, strength: float = 0.3, windowed: bool = False, seed: int = 0, page: int = 8, **params: Any):
        self.geometry = Geometry(LAYERS, HEADS * GROUP, HEADS, D, D, torch.float32, page)
        self.random = torch.Generator().manual_seed(seed)
        self.strength, self.windowed = strength, windowed
        self.store = Store(self.geometry, torch.device("cpu"), self.mode(**params))
        self.keys = [torch.empty(HEADS, 0, D) for _ in range(LAYERS)]
        self.query: list[torch.Tensor] = []

    def mode(self, name: str = "freeze", **params: Any):
        return build(parse(name, params), self.geometry, ModelTraits(4096, (None,) * LAYERS))

    def prefill(self, n: int, pinned: tuple[int, ...] = ()) -> None:
        with torch.inference_mode():
            with self.store.prefill(n, pinned):
                self._forward(n)
            self.store.settle()

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            with torch.inference_mode(), self.store.step(), self.store.layers():
                self._forward(1)

    def truncate(self, n: int) -> None:
        with torch.inference_mode():
            self.store.truncate(n)
        self.keys = [keys[:, :n] for keys in self.keys]

    def relax(self, level: str) -> None:
        with torch.inference_mode():
            self.store.mode.recover(level)

    def switch(self, name: str, **params: Any) -> None:
        with torch.inference_mode():
            self.store.switch(self.mode(name, **params))

    def active(self) -> set[int]:
        (table,) = {tuple(slots.table.flatten().tolist()) for slots in self.store.slots}
        return {position for position in table if position >= 0}

    def check(self) -> None:
        self.store.check_integrity()
        for slots, timers in zip(self.store.slots, self.store.mode.timers, strict=True):
            held = slots.table[slots.table >= 0].tolist()
            assert len(held) == len(set(held))
            active = (~timers.frozen[: self.store.total]).nonzero().flatten().tolist()
            assert sorted(held) == active

    def relevance(self, read: set[int], sink: int) -> dict[int, float]:
        """``prob_rel`` of the tokens the last step read: mean over heads, then over the layers that can see them."""
        sums: dict[int, list[float]] = {}
        total = self.store.total
        for layer in range(LAYERS):
            window = spec(layer, self.windowed).window
            seen = sorted(j for j in read if window is None or j > total - 1 - window)
            counted = [i for i, j in enumerate(seen) if j >= sink]
            logits = self.query[layer].double() @ self.keys[layer][:, seen].double().transpose(1, 2)
            weights = logits.softmax(-1).flatten(0, 1)
            shares = weights / weights[:, counted].sum(1, keepdim=True) * len(counted)
            for i, j in enumerate(seen):
                sums.setdefault(j, []).append(float(shares[:, i].mean()))
        return {j: sum(sums[j]) / len(sums[j]) if j in sums else 0.0 for j in read}

    def _forward(self, n: int) -> None:
        self.query = []
        for layer in range(LAYERS):
            q, k, v = (torch.randn(heads, n, D, generator=self.random) for heads in (HEADS * GROUP, HEADS, HEADS))
            k = k * self.strength
            self.keys[layer] = torch.cat((self.keys[layer], k), 1)
            self.query.append(q[:, -1].view(HEADS, GROUP, D))
            self.store.attention(layer, q, k, v, spec(layer, self.windowed))


# ---- the paper's numbers


@pytest.mark.parametrize("prompt", [14, 20])
def test_the_papers_tables_and_curve(prompt):
    run, simulation = Run(profile="paper"), Simulation(parse("freeze", PAPER).model_dump())
    run.prefill(prompt)
    simulation.total = prompt
    active = {}
    for step in range(1, 501):
        run.step()
        simulation.total += 1
        simulation.step(dict.fromkeys(simulation.active(), 0.0))
        assert run.active() == simulation.active()
        active[step] = len(run.active())
    run.check()
    if prompt == 14:
        curve = {10: 24, 40: 50, 100: 76, 200: 105, 300: 130, 400: 150, 500: 170}
        assert {step: active[step] for step in curve} == curve
        assert active[514 - 14] == 170
    assert active[269 - prompt] == 119


@pytest.mark.slow
def test_the_papers_curve_at_a_thousand_steps():
    run = Run(profile="paper")
    run.prefill(14)
    run.step(1000)
    assert len(run.active()) == 250


PAPER = {
    "tau": 0.5, "k": 2.0, "window": 32, "sink": 0, "protect": False, "history": 0, "stagger": 1,
    "same_step": True, "min_active": 0, "smooth": 0.0,
}  # fmt: skip


# ---- the rule


@pytest.mark.parametrize("windowed", [False, True])
def test_the_rule_is_the_simulations(windowed):
    params = {"min_active": 40, "window": 10, "tau": 0.8, "history": 20, "stagger": 8, **MEAN}
    run = Run(strength=0.8, windowed=windowed, **params)
    simulation = Simulation({**parse("freeze", params).model_dump()}, pinned={50, 60})
    run.prefill(120, (50, 60))
    simulation.total = 120
    for _ in range(120):
        read = simulation.active() | {simulation.total}
        run.step()
        simulation.total += 1
        assert {j for j in read if j < simulation.total} == simulation.active()
        simulation.step(run.relevance(simulation.active(), 4))
        assert run.active() == simulation.active(), f"token {simulation.total}"
    run.check()
    assert 40 <= len(run.active()) < 200
    assert {0, 1, 2, 3, 50, 60} <= run.active()


@pytest.mark.parametrize("score", ["raw", "scaled"])
def test_products_can_be_the_score(score):
    run = Run(score=score, tau=1.0, min_active=0, sink=0, stagger=1, k=1.0)
    run.prefill(60)
    run.step()
    scores = run.store.mode.timers[0].score[:61]
    expected = torch.stack([(run.query[i] @ run.keys[i].transpose(1, 2)).abs().mean((0, 1)) for i in range(LAYERS)])
    assert torch.allclose(scores, expected.mean(0), atol=1e-5)
    assert run.active() == {j for j in range(61) if scores[j] >= 1.0 or j > 60 - 32}


def test_the_keenest_head_of_any_layer_is_the_score_and_earlier_ones_count():
    """Two steps by hand: one that a single head wants stays, and what it scored before counts by ``smooth``."""
    run = Run(strength=2.0, min_active=0, stagger=1, tau=6.0, k=1.0, smooth=0.25, score="prob_max")
    run.prefill(80)
    before: dict[int, float] = {}
    for _ in range(6):
        read = run.active() | {run.store.total}
        run.step()
        best = dict.fromkeys(read, 0.0)
        for layer in range(LAYERS):
            seen = sorted(read)
            logits = run.query[layer].double() @ run.keys[layer][:, seen].double().transpose(1, 2)
            highest = logits.softmax(-1).amax((0, 1)) * sum(j >= 4 for j in seen)
            best = {j: max(best[j], float(highest[i])) for i, j in enumerate(seen)}
        expected = {j: 0.75 * s + 0.25 * before[j] if j in before else s for j, s in best.items()}
        scores = run.store.mode.timers[0].score
        assert torch.allclose(scores[sorted(read)].double(), torch.tensor([expected[j] for j in sorted(read)]).double())
        before |= {j: float(scores[j]) for j in read}
        kept = {j for j in read if expected[j] >= 6.0}
        assert kept <= run.active()
    assert len(run.active()) < run.store.total
    run.check()


def test_first_freezes_are_spread_over_time():
    left = []
    for stagger in (1, 8):
        run = Run(**{**EVERYTHING, "stagger": stagger})
        run.prefill(232)
        run.step(4)
        left.append(236 - len(run.active()))
    assert left == [197, 25]


def test_at_most_so_many_return_in_a_step():
    run = Run(**EVERYTHING, moves=5)
    run.prefill(100)
    run.step(4)
    before = len(run.active())
    for _ in range(6):
        frozen = set(range(run.store.total)) - run.active()
        run.step()
        assert len(frozen & run.active()) <= 5
    assert before < 60
    run.check()


def test_layers_may_freeze_tokens_of_their_own():
    run = Run(strength=1.0, per_layer=True, min_active=0, stagger=1, tau=1.0, **MEAN)
    run.prefill(150)
    run.step(30)
    run.check()
    first, second = (slots.table[slots.table >= 0].tolist() for slots in run.store.slots)
    assert set(first) != set(second)


# ---- memory


def test_frozen_tokens_give_their_memory_back_and_slots_are_reused():
    run = Run(**{**EVERYTHING, "score": "always"})
    run.prefill(600)
    whole = run.store.device_bytes
    run.step(150)
    assert run.store.device_bytes < 0.6 * whole
    (slots,) = run.store.slots
    assert slots.n < 0.6 * run.store.total
    run.check()


@pytest.mark.parametrize(("headroom", "most"), [(128, 25), (2048, 3)])
def test_slots_change_less_often_where_each_change_costs_a_graph(headroom, most):
    geometry = Geometry(LAYERS, HEADS * GROUP, HEADS, D, D, torch.float32, headroom=headroom)
    store = Store(geometry, torch.device("cpu"), build(parse("freeze", {"tau": 0.0}), geometry, ModelTraits(4096, ())))
    query, key = torch.zeros(HEADS * GROUP, 1, D), torch.zeros(HEADS, 1, D)
    sizes = [store.slots[0].n]
    for _ in range(1000):
        with torch.inference_mode(), store.step(), store.layers():
            for layer in range(LAYERS):
                store.attention(layer, query, key, key, spec(layer, False))
        sizes.append(store.slots[0].n)
    assert sum(one != other for one, other in pairwise(sizes)) <= most


def test_the_ceiling_holds_at_every_step():
    run = Run(tau=0.0, min_active=0, max_active=90)
    run.prefill(300)
    for _ in range(60):
        run.step()
        assert int(run.store.attended(0).sum(1).max()) <= 90
    run.prefill(100)
    run.step(5)
    assert int(run.store.attended(0).sum(1).max()) <= 90
    run.check()


def test_growth_never_fails_a_step_when_everything_returns():
    run = Run(**{**EVERYTHING, "score": "always"})
    run.prefill(500)
    run.step(200)
    run.relax("FR")
    assert run.active() == set(range(700))
    run.step(64)
    assert run.active() == set(range(764))
    run.check()
    run.step(10)
    assert len(run.active()) < 700


def test_returning_tokens_are_counted():
    run = Run(**EVERYTHING)
    run.prefill(100)
    run.step(10)
    moved, wanted, _ = run.store.transfer.totals.tolist()
    assert moved == int(run.store.mode.thawed) * LAYERS * HEADS > 0
    assert wanted > moved


def test_a_small_ceiling_is_refused():
    with pytest.raises(UsageError, match="max_active = 100 is not above min_active = 256"):
        Run(min_active=256, max_active=100)


# ---- conversations


def test_a_floor_above_all_tokens_reads_everything():
    run = Run(**{**EVERYTHING, "min_active": 4096})
    run.prefill(100)
    run.step(50)
    assert run.active() == set(range(150))
    assert run.store.mode.is_exact(150)


def test_a_new_turn_wakes_all_tokens():
    run = Run(**EVERYTHING)
    run.prefill(200)
    run.step(40)
    assert len(run.active()) < 150
    run.prefill(30)
    run.step(3)
    assert run.active() == set(range(273))
    run.step()
    assert len(run.active()) < 60
    run.check()


def test_a_new_turn_may_wake_only_what_it_finds_relevant():
    run = Run(strength=2.0, min_active=0, stagger=1, tau=0.5, wake=False, **MEAN)
    run.prefill(200)
    run.step(40)
    frozen = set(range(240)) - run.active()
    assert len(frozen) > 20
    run.prefill(30)
    assert set(range(240, 270)) <= run.active()
    scores = run.relevance(set(range(270)), 4)
    assert frozen & run.active() == {j for j in frozen if scores[j] >= 0.5}
    run.check()


def test_truncation_and_switches_leave_a_sound_store():
    run = Run(**EVERYTHING)
    run.prefill(150)
    run.step(30)
    run.truncate(140)
    run.check()
    run.step(20)
    run.check()
    run.switch("full")
    run.step(3)
    run.switch("freeze", **EVERYTHING)
    assert run.active() == set(range(163))
    run.step(20)
    run.check()


def test_an_aborted_step_changes_nothing():
    run = Run(**EVERYTHING)
    run.prefill(100)
    run.step(20)
    before = run.active()
    with pytest.raises(ValueError, match="boom"), torch.inference_mode(), run.store.step(), run.store.layers():
        raise ValueError("boom")
    assert run.active() >= before
    run.check()


@pytest.mark.parametrize("length", [100, 180])
def test_covers_is_never_wrongly_true(length):
    run = Run(strength=0.5, min_active=60, stagger=4, tau=0.5, **MEAN)
    run.prefill(length)
    reduced = covered = 0
    for _ in range(80):
        whole = len(run.active()) == run.store.total
        run.step()
        reduced += not whole
        covered += run.store.mode.is_exact(run.store.total)
        assert whole or not run.store.mode.is_exact(run.store.total)
    assert reduced
    assert covered


@pytest.mark.parametrize("level", LEVELS[:3])
def test_each_level_restores_what_it_says(level):
    run = Run(**EVERYTHING)
    run.prefill(150)
    run.step(90)
    (timers,) = run.store.mode.timers
    frozen = timers.frozen[:240].clone()
    c, d, since = timers.detections[:240].clone(), timers.timer[:240].clone(), timers.since[:240].clone()
    run.relax(level)
    expected = {"SR": frozen & (d > 1), "WR": frozen & (since >= 176), "FR": frozen}[level]
    assert torch.equal(timers.frozen[:240], frozen & ~expected)
    assert expected.any()
    if level == "FR":
        assert torch.equal(timers.detections[:240], torch.where(c > 0, c // 2, c))
    run.check()


def test_what_the_screen_shows():
    run = Run(**EVERYTHING)
    run.prefill(150)
    run.step(30)
    extras = run.store.mode.stats()
    assert extras["frozen now"] == 180 - len(run.active())
    assert extras["thaws a step"] > 0
    assert run.store.mode.letter(0.2) == run.store.mode.reach() == "F"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, 25)),
            st.tuples(st.just("prefill"), st.integers(1, 60)),
            st.tuples(st.just("truncate"), st.floats(0.2, 1.0)),
            st.tuples(st.just("relax"), st.sampled_from(LEVELS[:3])),
        ),
        max_size=8,
    ),
    st.sampled_from([{}, {"per_layer": True}, {"max_active": 70, "window": 16}, {"moves": 3}, {"profile": "paper"}]),
    st.integers(1, 40),
)
def test_any_conversation_leaves_a_sound_store(actions, params, page):
    run = Run(strength=1.0, page=page, **{"min_active": 0, "stagger": 3, **params})
    run.prefill(50)
    for action, value in actions:
        if action == "truncate":
            value = max(1, int(run.store.total * value))
        getattr(run, action)(value)
        run.check()
        assert set(range(max(0, run.store.total - 16), run.store.total)) <= {
            position for slots in run.store.slots for position in slots.table.flatten().tolist()
        }
