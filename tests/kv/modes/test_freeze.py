"""Freeze mode: budget, slots and memory, pages that queries point at, turns, any conversation."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.freeze_run import EVERYTHING, GROUP, HEADS, LAYERS, TIMERS_ONLY, D, FreezeRun, spec
from support.kv_steps import decode_step, forward

from kvchat.config.modes import parse
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build, freeze, freeze_timers
from kvchat.kv.modes.base import LEVELS, ModelTraits, TokenState
from kvchat.kv.modes.freeze_timers import Timers


def at_once(floor: int = 0, stagger: int = 1, **params) -> FreezeRun:
    """Every token outside the window freezes as soon as the timers allow; nothing is recalled."""
    return FreezeRun(rule={**TIMERS_ONLY, "floor": floor, "stagger": stagger}, **{**EVERYTHING, **params})


# ---- memory


def test_frozen_tokens_free_memory_and_slots():
    run = at_once(score="always", stagger=64).begun(600)
    whole = run.kv.device_bytes
    run.step(300)
    assert run.kv.device_bytes < 0.75 * whole
    (slots,) = run.kv.state.slots
    assert slots.n < 0.62 * run.kv.total
    run.check()


@pytest.mark.parametrize(("headroom", "most"), [(128, 25), (2048, 3)])
def test_slots_resize_less_often_with_more_headroom(headroom, most):
    geometry = Geometry(1, HEADS * GROUP, HEADS, D, D, torch.float32, headroom=headroom)
    kv = KVManager(geometry, torch.device("cpu"), build(parse("freeze", {"tau": 0.0}), geometry, ModelTraits(4096, ())))
    query, key = torch.zeros(HEADS * GROUP, 1, D), torch.zeros(HEADS, 1, D)
    sizes = [kv.state.slots[0].n]
    for _ in range(1000):
        with torch.inference_mode(), decode_step(kv), forward(kv):
            kv.attention(0, query, key, key, spec(0, False))
        sizes.append(kv.state.slots[0].n)
    assert sum(one != other for one, other in pairwise(sizes)) <= most


def test_slots_grow_when_every_frozen_token_returns():
    run = at_once(score="always").begun(500, 200)
    run.recover("FR")
    assert run.active() == set(range(700))
    run.step(64)
    assert run.active() == set(range(764))
    run.check()
    fewest = 700
    for _ in range(10):
        run.step()
        fewest = min(fewest, len(run.active()))
    assert fewest < 100


@pytest.mark.parametrize("stagger", [1, 64])
def test_tokens_still_in_their_slot_return_without_a_copy(monkeypatch, stagger):
    """The sets equal those with every return copied; reads are checked against the host at every step."""
    counted, keep = {}, Timers.note_held
    for keeps in (True, False):
        with monkeypatch.context() as patch:
            if not keeps:
                patch.setattr(Timers, "note_held", lambda self, table, held, keeps: keep(self, table, held, False))
            run, read = at_once(score="always", stagger=stagger), []
            run.prefill(300)
            for _ in range(80):
                run.step()
                run.check()
                read.append(run.active())
            moved, wanted, *_ = run.kv.state.transfer.totals
            returned = int(run.kv.mode.thawed) * LAYERS * HEADS
            counted[keeps] = read, wanted, returned, moved
    kept, copied = counted[True], counted[False]
    assert kept[:3] == copied[:3]
    assert kept[2] == copied[3] > 2 * kept[3] > 0
    assert kept[1] > copied[3]


@pytest.fixture
def sixteen_a_step(monkeypatch):
    """A step copies at most 16 tokens, and slots keep no frozen tokens, so every return is a copy."""
    keep = Timers.note_held
    monkeypatch.setattr(freeze, "MOST_MOVED", 16)
    monkeypatch.setattr(freeze, "MOVED_SHARE", 1000)
    monkeypatch.setattr(Timers, "note_held", lambda self, table, held, keeps: keep(self, table, held, False))


def moved_by_step(run: FreezeRun) -> int:
    """Decode one token; returns how many tokens were copied for it."""
    before = run.kv.state.transfer.totals.moved
    run.step()
    run.check()
    return (run.kv.state.transfer.totals.moved - before) // (LAYERS * HEADS)


def read_by_step(run: FreezeRun) -> set[int]:
    return set(attended(run.kv.state, 0)[0].nonzero().flatten().tolist())


@pytest.mark.usefixtures("sixteen_a_step")
def test_steps_copy_a_limited_number_most_relevant_first():
    run = FreezeRun(rule={"floor": 0, "stagger": 1}, **EVERYTHING).begun(300, 40)
    run.recover("FR")
    score, before, moved, exact = run.kv.mode.timers.score.clone(), read_by_step(run), [], set()
    for _ in range(30):
        moved.append(moved_by_step(run))
        read = read_by_step(run)
        if len(moved) == 1:
            returned, absent = read - before - {run.kv.total - 1}, set(range(run.kv.total)) - read
            assert max(score[sorted(absent)]) <= min(score[sorted(returned)])
        assert run.kv.step.exact == (len(read) == run.kv.total)
        exact.add(run.kv.step.exact)
    assert moved[:5] == [16] * 5
    assert moved[-1] == 0
    assert exact == {False, True}


@pytest.mark.usefixtures("sixteen_a_step")
def test_the_paper_profile_returns_all_tokens_at_once():
    run = FreezeRun(profile="paper").begun(300)
    assert max(moved_by_step(run) for _ in range(20)) > 200


def test_a_too_small_budget_is_rejected():
    with pytest.raises(UsageError, match=r"budget = 100.*4 \+ 96 = 100"):
        FreezeRun(K=96, budget=100)


# ---- pages that queries point at


def test_hot_frozen_pages_are_read_from_the_next_step_on():
    run = FreezeRun(rule={"floor": 0, "stagger": 1}, strength=0.05, **EVERYTHING).begun(200, 40)
    page = next(page for page in range(1, 20) if not set(range(8 * page, 8 * page + 8)) & run.active())
    wanted = set(range(8 * page, 8 * page + 8))
    run.look_for(layer=1, token=8 * page + 3)
    assert not wanted & read_by_step(run)
    assert wanted <= run.active()
    run.step()
    assert wanted <= read_by_step(run)
    left = set()
    for _ in range(6):
        run.step()
        left |= wanted - run.active()
    assert left == wanted
    run.check()


@pytest.mark.parametrize("seeks", [True, False])
def test_tokens_after_a_retrieved_token_are_read_next(monkeypatch, seeks):
    """Even beyond its page, the only one that the query points at."""
    if not seeks:
        monkeypatch.setattr(freeze_timers, "RETRIEVED", float("inf"))
    run = FreezeRun(rule={"floor": 0, "stagger": 4}, strength=0.05, tau=1.5).begun(800, 40)
    active = run.active()
    token = next(t for t in range(8, 160) if t in active and set(range(t // 8 * 8 + 8, t + 16)) - active)
    run.look_for(layer=1, token=token)
    assert (set(range(token, token + 16)) <= run.active()) == seeks
    assert len(run.active()) < run.kv.total
    run.check()


# ---- conversations


def test_a_new_turn_keeps_tokens_frozen():
    run = at_once().begun(200, 40)
    frozen = set(range(240)) - run.active()
    assert len(frozen) > 100
    run.prefill(30)
    assert set(range(270)) - run.active() == frozen
    run.check()


@pytest.mark.parametrize("length", [100, 180])
def test_a_step_is_exact_if_and_only_if_it_reads_everything(length):
    run = FreezeRun(rule={"floor": 60, "stagger": 4}, strength=0.5, tau=0.5).begun(length)
    exact = []
    for _ in range(80):
        run.step()
        exact.append(run.kv.step.exact)
        assert exact[-1] == bool(attended(run.kv.state, 0).all())
    assert 0 < sum(exact) < 80


def test_the_report_counts_frozen_tokens():
    run = at_once().begun(150, 30)
    stats = run.kv.mode.report().stats
    assert stats["frozen now"] == 180 - len(run.active())
    assert stats["restored per step"] > 0
    assert run.kv.mode.report().absent is TokenState.FROZEN


@settings(max_examples=25)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, 25)),
            st.tuples(st.just("prefill"), st.integers(1, 60)),
            st.tuples(st.just("truncate"), st.floats(0.2, 1.0)),
            st.tuples(st.just("recover"), st.sampled_from(LEVELS[:3])),
        ),
        max_size=8,
    ),
    st.sampled_from([{}, {"budget": 70, "K": 16}, {"profile": "paper"}]),
    st.integers(1, 40),
)
def test_any_conversation_keeps_the_kv_consistent(actions, params, page):
    run = FreezeRun(rule={"floor": 0, "stagger": 3}, strength=1.0, page=page, **params).begun(50)
    for action, value in actions:
        if action == "truncate":
            value = max(1, int(run.kv.total * value))
        getattr(run, action)(value)
        run.check()
        assert set(range(max(0, run.kv.total - 16), run.kv.total)) <= run.active()


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("position", [-1, 0, 31, 32, 150, 383])
def test_compiled_hot_pages_match_torch(windowed, position, monkeypatch):
    """With queries that point at a page's keys, some outside a layer's window."""
    run = FreezeRun(windowed=windowed).begun(384)
    mode, draw = run.kv.mode, torch.Generator().manual_seed(position)
    bounds = mode.bounds.data
    for layer, head in ((x, y) for x in range(bounds.shape[0]) for y in range(bounds.shape[1])):
        page = int(torch.randint(bounds.shape[2], (), generator=draw))
        group = slice(head * mode.geometry.group, (head + 1) * mode.geometry.group)
        run.kv.state.query[layer, group] = bounds[layer, head, page, : mode.geometry.d_k] * 1000
    hot = mode._hot_pages(torch.tensor(position))
    monkeypatch.setattr(freeze, "freeze_loops", lambda: None)
    assert torch.equal(hot, mode._hot_pages(torch.tensor(position)))
    assert bool(hot.any()) == (position >= 0)
