"""Sync mode: schedule, moves, budgets and clusters; ``test_every_mode.py`` tests its sets and outputs."""

from typing import Any

import pytest
import torch
from support.kv_run import REFERENCES, Run
from support.reference import FullReference
from support.toy_model import calibration, toy

from kvchat.config.modes import parse
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.sync import paper_k
from kvchat.kv.modes.sync_heads import Calibration, default_clusters, kmeans, roles

FOUR = {"kv_heads": 4, "group": 2, "page": 8}  # for a toy model


def mode_of(kv_heads: int = 4, *, calibrated: bool = True, **params: Any) -> Any:
    """The mode, not entered."""
    geometry = Geometry(3, 2 * kv_heads, kv_heads, 64, 64, torch.float32)
    traits = ModelTraits(8192, (None,) * 3, None, calibration(geometry) if calibrated else None)
    return build(parse("sync", params), geometry, traits)


def full_bytes(mode: Any, tokens: int) -> int:
    """Device bytes of full mode with the same geometry."""
    full = build(parse("full", {}), mode.geometry, mode.traits)
    return full.plan(tokens).device_bytes(full.geometry)


SMALL = {"budget": 80, "m": 5}


# ---- without followers


@pytest.mark.parametrize("params", [{"clusters": 4}, {"clusters": 9}, {"kv_heads": 1}, {"calibrated": False}])
def test_sync_without_followers_is_full_mode(params):
    mode = mode_of(**params)
    kv = KVManager(mode.geometry, torch.device("cpu"), mode)
    assert kv.device_bytes == full_bytes(mode, 128)
    assert "as full" in mode.report().stats["representative heads"]
    assert mode.needs_calibration == (params == {"calibrated": False})
    assert mode.prepare_step().exact


# ---- the schedule


def test_tokens_move_only_at_every_mth_step():
    run, moved = Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL), []
    run.prefill(200)
    for _ in range(25):
        before = run.kv.state.transfer.totals.moved
        run.step()
        moved.append(run.kv.state.transfer.totals.moved - before)
    assert [t for t, n in enumerate(moved, 1) if n] == [5, 10, 15, 20, 25]
    assert run.kv.mode.report().stats["anticipation steps"] == 5


def test_set_overlap_is_counted_between_anticipation_steps():
    run = Run(toy(("plain",) * 2, **FOUR), "sync", **SMALL).begun(200, 5)
    mode = run.kv.mode
    kept, chosen = mode.overlap.tolist()
    assert chosen == 2 * (mode.k_of(10**6) - 4 - mode.static)
    assert mode.report().stats["set overlap"] == f"{kept / chosen:.0%}"
    assert 3 * (chosen - kept) == run.kv.state.transfer.totals.moved


# ---- without offload


def test_without_offload_nothing_moves():
    runs = [
        Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL, offload=offload).begun(200, 12) for offload in (True, False)
    ]
    assert runs[1].kv.state.transfer.totals.moved == 0
    assert runs[1].kv.device_bytes > 1.5 * runs[0].kv.device_bytes
    assert runs[1].kv.mode.report().stats["of full's memory"] == "100%"
    assert ["100% of full" in "".join(run.kv.mode.report().badges) for run in runs] == [False, True]


def test_empty_slots_open_no_token_without_offload_and_sinks():
    """As in the paper: an empty slot must not stand for token 0, which no sink reads anyway."""
    params = {"profile": "paper", "representatives": "retrieval", "offload": False}
    Run(toy(("plain",) * 3, **FOUR), "sync", **SMALL, **params).begun(200, 12)


@pytest.mark.parametrize(("stored", "warns"), [(600, False), (1400, True), (3000, False)])
def test_a_budget_that_saves_no_memory_warns(stored, warns):
    """Of 600 tokens all are read; of 1,400 not all, in more slots than full mode has; of 3,000 few are held."""
    run = Run(toy(("plain",) * 3, **FOUR), "sync", budget=1200, rho=0.0).begun(stored)
    mode = run.kv.mode
    badges = mode.report().badges
    assert bool(badges) == warns
    assert badges == () or "budget" in badges[0]
    assert (mode._memory_share() >= 1 and not mode.prepare_step().exact) == warns


# ---- Budgets: the paper's shares of memory, what they leave for a follower, and refusals


@pytest.mark.parametrize(
    ("heads", "representatives", "mem", "share"),
    [
        (8, 2, 0.5, 0.333),
        (8, 2, 0.3, 0.067),
        (8, 3, 0.5, 0.2),
        (4, 1, 0.5, 0.333),
        (4, 1, 0.3, 0.067),
        (8, 1, 0.3, 0.2),
    ],
)
def test_follower_budgets_match_the_paper(heads, representatives, mem, share):
    assert paper_k(mem, 100_000, heads, representatives) / 100_000 == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("mem", "heads", "representatives"), [(0.2, 8, 2), (0.25, 8, 2), (0.5, 4, 2)])
def test_a_share_below_the_representatives_is_rejected(mem, heads, representatives):
    floor = representatives / heads
    with pytest.raises(DoesNotFitError, match=f"already takes {floor:.0%}.*over {floor:.2f}"):
        paper_k(mem, 1000, heads, representatives)
    with pytest.raises(DoesNotFitError, match=f"already takes {floor:.0%}"):
        mode_of(heads, mem=mem, clusters=representatives)


@pytest.mark.parametrize("mem", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("tokens", [2_000, 20_000])
def test_mem_is_the_allocated_share_of_full_modes_bytes(mem, tokens):
    mode = mode_of(mem=mem)
    # K and V rows; tables (full has one, sync one per head) add 2 % at this head size.
    assert mem - 0.05 < mode.plan(tokens).device_bytes(mode.geometry) / full_bytes(mode, tokens) < mem + 0.02


def test_k_follows_from_the_budget_and_is_at_least_64():
    assert mode_of(budget=400, m=5).k_of(4000) == 400 - 132
    assert mode_of(mem=0.3).k_of(1500) == 64


def test_k_depends_on_stored_tokens_not_on_capacity(monkeypatch):
    """The capacity depends on the device (audit, 5)."""
    monkeypatch.setitem(REFERENCES, "sync", FullReference)
    for tokens in (900, 1000):
        run = Run(toy(("plain", "plain"), **FOUR), "sync", mem=0.5)
        run.kv.state.specs = list(run.toy.specs)
        run.store_only(tokens)
        assert run.kv.mode.k == run.kv.mode.k_of(tokens) > 64
        run.kv._make_room(tokens + 500)
        run.kv.refill()
        assert run.kv.mode.k == run.kv.mode.k_of(tokens)


@pytest.mark.parametrize(("heads", "mem"), [(8, 0.5), (4, 0.5), (2, 2 / 3), (3, 5 / 9)])
def test_the_default_leaves_followers_a_third_of_the_tokens(heads, mem):
    """It used to be refused with 2 KV heads, as in Qwen2.5-0.5B (audit, 7)."""
    mode = mode_of(heads, clusters=max(1, heads // 4))
    assert mode.mem == pytest.approx(mem)
    assert paper_k(mode.mem, 300, heads, mode.clusters) == pytest.approx(100)


@pytest.mark.parametrize("heads", [4, 8])
def test_the_paper_profile_gives_followers_k_tokens_without_sinks(heads):
    mode = mode_of(heads, clusters=heads // 4, profile="paper")
    assert mode.k_of(30_000) == int(paper_k(0.5, 30_000, heads, heads // 4)) == 10_000
    assert (mode.sink, mode._dynamic_share(101)) == (0, 50)
    assert mode.k_of(30_000) > mode_of(heads, clusters=heads // 4, mem=0.5).k_of(30_000)


@pytest.mark.parametrize(("rho", "k", "dynamic"), [(0.8, 100, 20), (0.5, 101, 50), (0.9, 70, 7), (0.0, 9, 5)])
def test_the_dynamic_share_is_computed_exactly(rho, k, dynamic):
    """In floating point (1 - 0.8) * 100 is below 20 (audit, 8)."""
    assert mode_of(rho=rho)._dynamic_share(k) == dynamic


def test_a_budget_below_the_recent_tokens_is_rejected():
    with pytest.raises(UsageError, match=r"budget = 64.*4 \+ 80"):
        mode_of(budget=64, m=80)


def test_a_small_budget_shortens_the_default_window():
    mode = mode_of(budget=100)
    assert (mode.window, mode.ring) == (44, 48)
    assert mode.k_of(1000) == 52
    assert mode_of(budget=512).window == 128


# ---- Clusters of KV heads and their representatives


# Heads 0, 3 and 5 are similar, and so are 1, 2 and 4; 3 and 2 are the centers.
PAIRS = {(0, 3): 0.9, (3, 5): 0.9, (0, 5): 0.8, (1, 2): 0.85, (2, 4): 0.85, (1, 4): 0.7}
SIMILARITY = tuple(tuple(1.0 if a == b else PAIRS.get((min(a, b), max(a, b)), 0.1) for b in range(6)) for a in range(6))
RETRIEVAL = (0.1, 0.0, 0.2, 0.0, 0.6, 0.3)


@pytest.mark.parametrize(
    ("clusters", "rule", "representatives", "follows"),
    [
        (2, "retrieval", (5, 4), {0: 0, 1: 1, 2: 1, 3: 0}),  # the best retriever of each cluster
        (2, "centroid", (3, 2), {0: 0, 1: 1, 4: 1, 5: 0}),  # the paper's rule: the center
        (1, "retrieval", (4,), dict.fromkeys((0, 1, 2, 3, 5), 0)),
    ],
)
def test_roles_assign_representatives_and_followers(clusters, rule, representatives, follows):
    measured = Calibration("r", "a text", 2, (SIMILARITY,), (RETRIEVAL,))
    (layer,) = roles(measured, clusters, rule)
    assert layer.representatives == representatives
    assert dict(zip(layer.followers, layer.follows, strict=True)) == follows


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_numbers_separate_clouds_by_first_member(seed):
    centers = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, 9.0]], dtype=torch.float64)
    noise = torch.randn(30, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels, found = kmeans(centers.repeat(10, 1) + 0.3 * noise, 3, seed)
    assert labels.tolist() == [0, 1, 2] * 10
    torch.testing.assert_close(found, centers, atol=0.5, rtol=0)


@pytest.mark.parametrize("clusters", [1, 2, 5, 8])
def test_no_cluster_is_empty_even_if_points_coincide(clusters):
    points = torch.zeros(8, 3, dtype=torch.float64)
    points[6:] = 1
    labels, _ = kmeans(points, clusters)
    assert labels.unique().tolist() == list(range(clusters))


@pytest.mark.parametrize(("heads", "clusters"), [(1, 1), (2, 1), (4, 1), (8, 2), (32, 8)])
def test_a_quarter_of_the_heads_are_representatives(heads, clusters):
    assert default_clusters(heads, "llama") == clusters


def test_qwen_has_one_representative_as_in_the_paper():
    """Qwen2.5-14B has 8 KV heads (audit, 7)."""
    assert default_clusters(8, "qwen2") == default_clusters(2, "qwen2") == 1
