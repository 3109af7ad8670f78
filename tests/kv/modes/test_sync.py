"""Sync: schedule and what moves; its sets and outputs are in the tables of ``tests/kv``."""

from __future__ import annotations

import pytest
import torch
from support.kv_run import Run
from support.sync_modes import FOUR, mode_of
from support.toy_model import toy

from kvchat.config.modes import parse
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build

CPU = torch.device("cpu")
SMALL = {"budget": 80, "m": 5}


def moved_in_a_step(run: Run) -> int:
    before = run.kv.state.transfer.totals.moved
    run.step()
    return run.kv.state.transfer.totals.moved - before


# ---- nobody to follow


@pytest.mark.parametrize("params", [{"clusters": 4}, {"clusters": 9}, {"calibrated": False}])
def test_with_nobody_to_follow_it_is_full_and_says_so(params):
    mode = mode_of(**params)
    kv = KVManager(mode.geometry, CPU, mode)
    assert kv.device_bytes == build(parse("full", {}), mode.geometry, mode.traits).plan(128).device_bytes(
        build(parse("full", {}), mode.geometry, mode.traits).geometry
    )
    assert "as full" in mode.report().stats["representative heads"]
    assert mode.needs_calibration == (params == {"calibrated": False})
    assert mode.prepare_step().exact


def test_one_head_is_full():
    mode = mode_of(1)
    KVManager(mode.geometry, CPU, mode)
    assert mode.report().stats["representative heads"].startswith("all 1")


# ---- the schedule


def test_tokens_move_at_every_m_th_step_only():
    run = Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL)
    run.prefill(200)
    moved = [moved_in_a_step(run) for _ in range(25)]
    assert [t for t, n in enumerate(moved, 1) if n] == [5, 10, 15, 20, 25]
    assert run.kv.mode.report().stats["anticipation steps"] == 5


def test_a_turn_begins_the_count_anew():
    run = Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL)
    run.prefill(200)
    run.step(3)
    run.prefill(20)
    assert [bool(moved_in_a_step(run)) for _ in range(5)] == [False] * 4 + [True]


def test_what_is_chosen_at_a_step_is_read_at_the_next():
    run = Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL)
    run.prefill(200)
    (leader,) = run.kv.mode.roles[0].representatives
    follower = run.kv.mode.roles[0].followers[0]
    sets = []
    for _ in range(12):
        run.step()
        sets.append(frozenset(attended(run.kv.state, 0)[follower, :180].nonzero().flatten().tolist()))
        assert bool(attended(run.kv.state, 0)[leader].all())
    assert len(set(sets[:5])) == len(set(sets[5:10])) == len(set(sets[10:])) == 1
    assert len({sets[4], sets[5], sets[10]}) == 3


def test_followers_of_a_cluster_read_the_same_tokens_and_static_ones_stay():
    run = Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL, clusters=2, rho=0.5)
    run.prefill(200)
    static = run.kv.mode.held[:, :, : run.kv.mode.static].clone()
    for _ in range(11):
        run.step()
    assert torch.equal(run.kv.mode.held[:, :, : run.kv.mode.static], static)
    for layer, roles in enumerate(run.kv.mode.roles):
        seen = attended(run.kv.state, layer)
        assert len(roles.followers) == 2
        for head, group in zip(roles.followers, roles.follows, strict=True):
            expected = run.kv.mode.held[layer, group]
            assert bool(seen[head][expected[expected >= 0]].all())


def test_no_token_is_out_of_reach_between_the_ring_and_the_next_choice():
    run = Run(toy(("plain",) * 2, **FOUR), "sync", budget=1000, m=6)
    run.prefill(60)
    for _ in range(80):
        run.step()
        assert bool(attended(run.kv.state, 1).all())
        assert run.kv.step.exact


def test_overlap_is_counted_from_one_anticipation_to_the_next():
    run = Run(toy(("plain",) * 2, **FOUR), "sync", **SMALL)
    run.prefill(200)
    run.step(5)
    mode = run.kv.mode
    kept, chosen = mode.overlap.tolist()
    assert chosen == 2 * (mode.k_of(10**6) - 4 - mode.static)
    assert mode.report().stats["set overlap"] == f"{kept / chosen:.0%}"
    assert 3 * (chosen - kept) == run.kv.state.transfer.totals.moved


# ---- without offload


def test_without_offload_the_sets_are_the_same_and_nothing_moves():
    runs = [Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL, offload=offload) for offload in (True, False)]
    for run in runs:
        run.prefill(200)
    for _ in range(12):
        for one, other in zip(*(run.step() for run in runs), strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
        for layer in range(3):
            assert torch.equal(*(attended(run.kv.state, layer) for run in runs))
    assert runs[1].kv.state.transfer.totals.moved == 0
    assert runs[1].kv.device_bytes > 1.5 * runs[0].kv.device_bytes
    assert runs[1].kv.mode.report().stats["of full's memory"] == "100%"
    assert ["100% of full" in "".join(run.kv.mode.report().badges) for run in runs] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("stored", "warns"), [(600, False), (1400, True), (3000, False)])
def test_a_budget_near_what_is_stored_warns_while_less_is_read_for_more_memory(stored, warns):
    """Of 600 tokens all are read; of 1,400 some are not, in more slots than full has; of 3,000 few are held."""
    run = Run(toy(("plain",) * 3, **FOUR), "sync", budget=1200, rho=0.0)
    run.prefill(stored)
    mode = run.kv.mode
    badges = mode.report().badges
    assert bool(badges) == warns
    assert badges == () or "budget" in badges[0]
    assert (mode._memory_share() >= 1 and not mode.prepare_step().exact) == warns


@pytest.mark.parametrize("budget", [320, 1024])
@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
def test_a_budget_above_what_is_stored_reads_everything(budget, rho):
    """The slots are fewer than k there: what they hold is cut to their number."""
    run = Run(toy(("plain",) * 3, **FOUR), "sync", budget=budget, rho=rho)
    run.prefill(150)
    for _ in range(12):
        run.step()
        assert all(bool((attended(run.kv.state, layer) == 1).all()) for layer in range(3))
