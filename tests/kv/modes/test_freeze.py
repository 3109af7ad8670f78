"""Freeze mode on a kv: its slots and memory, its ceiling and floor, turns, truncation and switches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.freeze_run import EVERYTHING, GROUP, HEADS, LAYERS, MEAN, D, FreezeRun, spec
from support.kv_steps import decode_step, forward

from kvchat.config.modes import parse
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits, TokenState
from kvchat.kv.modes.recovery_levels import LEVELS


def test_layers_may_freeze_tokens_of_their_own():
    run = FreezeRun(strength=1.0, per_layer=True, min_active=0, stagger=1, tau=1.0, **MEAN)
    run.prefill(150)
    run.step(30)
    run.check()
    first, second = (slots.table[slots.table >= 0].tolist() for slots in run.kv.state.slots)
    assert set(first) != set(second)


# ---- memory


def test_frozen_tokens_give_their_memory_back_and_slots_are_reused():
    run = FreezeRun(**{**EVERYTHING, "score": "always"})
    run.prefill(600)
    whole = run.kv.device_bytes
    run.step(150)
    assert run.kv.device_bytes < 0.6 * whole
    (slots,) = run.kv.state.slots
    assert slots.n < 0.6 * run.kv.total
    run.check()


@pytest.mark.parametrize(("headroom", "most"), [(128, 25), (2048, 3)])
def test_slots_change_less_often_where_each_change_costs_a_graph(headroom, most):
    geometry = Geometry(LAYERS, HEADS * GROUP, HEADS, D, D, torch.float32, headroom=headroom)
    kv = KVManager(geometry, torch.device("cpu"), build(parse("freeze", {"tau": 0.0}), geometry, ModelTraits(4096, ())))
    query, key = torch.zeros(HEADS * GROUP, 1, D), torch.zeros(HEADS, 1, D)
    sizes = [kv.state.slots[0].n]
    for _ in range(1000):
        with torch.inference_mode(), decode_step(kv), forward(kv):
            for layer in range(LAYERS):
                kv.attention(layer, query, key, key, spec(layer, False))
        sizes.append(kv.state.slots[0].n)
    assert sum(one != other for one, other in pairwise(sizes)) <= most


def test_the_ceiling_holds_at_every_step():
    run = FreezeRun(tau=0.0, min_active=0, max_active=90)
    run.prefill(300)
    for _ in range(60):
        run.step()
        assert int(attended(run.kv.state, 0).sum(1).max()) <= 90
    run.prefill(100)
    run.step(5)
    assert int(attended(run.kv.state, 0).sum(1).max()) <= 90
    run.check()


def test_growth_never_fails_a_step_when_everything_returns():
    run = FreezeRun(**{**EVERYTHING, "score": "always"})
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
    run = FreezeRun(**EVERYTHING)
    run.prefill(100)
    run.step(10)
    moved, wanted, _ = run.kv.state.transfer.totals.tolist()
    assert moved == int(run.kv.mode.thawed) * LAYERS * HEADS > 0
    assert wanted > moved


def test_a_small_ceiling_is_refused():
    with pytest.raises(UsageError, match="max_active = 100 is not above min_active = 256"):
        FreezeRun(min_active=256, max_active=100)


# ---- conversations


def test_a_floor_above_all_tokens_reads_everything():
    run = FreezeRun(**{**EVERYTHING, "min_active": 4096})
    run.prefill(100)
    run.step(50)
    assert run.active() == set(range(150))
    assert run.kv.mode.is_exact(150)


def test_a_new_turn_wakes_all_tokens():
    run = FreezeRun(**EVERYTHING)
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
    run = FreezeRun(strength=2.0, min_active=0, stagger=1, tau=0.5, wake=False, **MEAN)
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
    run = FreezeRun(**EVERYTHING)
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
    run = FreezeRun(**EVERYTHING)
    run.prefill(100)
    run.step(20)
    before = run.active()
    with pytest.raises(ValueError, match="boom"), torch.inference_mode(), decode_step(run.kv), forward(run.kv):
        raise ValueError("boom")
    assert run.active() >= before
    run.check()


@pytest.mark.parametrize("length", [100, 180])
def test_covers_is_never_wrongly_true(length):
    run = FreezeRun(strength=0.5, min_active=60, stagger=4, tau=0.5, **MEAN)
    run.prefill(length)
    reduced = covered = 0
    for _ in range(80):
        whole = len(run.active()) == run.kv.total
        run.step()
        reduced += not whole
        covered += run.kv.mode.is_exact(run.kv.total)
        assert whole or not run.kv.mode.is_exact(run.kv.total)
    assert reduced
    assert covered


def test_what_the_screen_shows():
    run = FreezeRun(**EVERYTHING)
    run.prefill(150)
    run.step(30)
    extras = run.kv.mode.report().stats
    assert extras["frozen now"] == 180 - len(run.active())
    assert extras["mean thaws"] > 0
    assert run.kv.mode.report().absent is TokenState.FROZEN


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
    run = FreezeRun(strength=1.0, page=page, **{"min_active": 0, "stagger": 3, **params})
    run.prefill(50)
    for action, value in actions:
        if action == "truncate":
            value = max(1, int(run.kv.total * value))
        getattr(run, action)(value)
        run.check()
        assert set(range(max(0, run.kv.total - 16), run.kv.total)) <= {
            position for slots in run.kv.state.slots for position in slots.table.flatten().tolist()
        }
