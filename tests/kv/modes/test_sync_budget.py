"""Sync's budgets: the paper's shares of memory, what they leave a follower, and what is refused."""

from __future__ import annotations

import pytest
from support.kv_run import REFERENCES, Run
from support.reference import FullReference
from support.sync_modes import FOUR, mode_of
from support.toy_model import toy

from kvchat.config.modes import parse
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.modes import build
from kvchat.kv.modes.sync_budget import paper_k


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
def test_the_papers_budgets(heads, representatives, mem, share):
    assert paper_k(mem, 100_000, heads, representatives) / 100_000 == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("mem", "heads", "representatives"), [(0.2, 8, 2), (0.25, 8, 2), (0.5, 4, 2)])
def test_a_share_below_the_representatives_is_refused_with_the_floor(mem, heads, representatives):
    floor = representatives / heads
    with pytest.raises(DoesNotFitError, match=f"takes {floor:.0%} already.*over {floor:.2f}"):
        paper_k(mem, 1000, heads, representatives)
    with pytest.raises(DoesNotFitError, match=f"takes {floor:.0%} already"):
        mode_of(heads, mem=mem, clusters=representatives)


@pytest.mark.parametrize("mem", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("tokens", [2_000, 20_000])
def test_mem_is_the_share_of_fulls_bytes_that_are_allocated(mem, tokens):
    mode = mode_of(mem=mem)
    full = (
        build(parse("full", {}), mode.geometry, mode.traits)
        .plan(tokens)
        .device_bytes(build(parse("full", {}), mode.geometry, mode.traits).geometry)
    )
    # Rows of K and V; tables, which full has one of and sync one a head, come to 2 % at this head size.
    assert mem - 0.05 < mode.plan(tokens).device_bytes(mode.geometry) / full < mem + 0.02


def test_k_follows_from_the_budget_or_is_at_least_64():
    assert mode_of(budget=400, m=5).k_of(4000) == 400 - 132
    assert mode_of(mem=0.3).k_of(1500) == 64


def test_a_turn_begins_with_k_by_its_tokens_not_by_the_room_there_is(monkeypatch):
    """The room depends on the device (audit, 5)."""
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
    """Refused with 2 KV heads, as Qwen2.5-0.5B has, it was (audit, 7)."""
    mode = mode_of(heads, clusters=max(1, heads // 4))
    assert mode.mem == pytest.approx(mem)
    assert paper_k(mode.mem, 300, heads, mode.clusters) == pytest.approx(100)


@pytest.mark.parametrize("heads", [4, 8])
def test_as_published_a_follower_holds_the_papers_k_without_sinks_of_its_own(heads):
    mode = mode_of(heads, clusters=heads // 4, profile="paper")
    assert mode.k_of(30_000) == int(paper_k(0.5, 30_000, heads, heads // 4)) == 10_000
    assert (mode.sink, mode._dynamic_share(101)) == (0, 50)
    assert mode.k_of(30_000) > mode_of(heads, clusters=heads // 4, mem=0.5).k_of(30_000)


def test_as_published_half_of_two_heads_is_refused():
    with pytest.raises(DoesNotFitError, match="takes 50% already"):
        mode_of(2, clusters=1, profile="paper")
    assert mode_of(2, clusters=1, profile="paper", mem=0.8).mem == 0.8


@pytest.mark.parametrize(("rho", "k", "dynamic"), [(0.8, 100, 20), (0.5, 101, 50), (0.9, 70, 7), (0.0, 9, 5)])
def test_the_dynamic_share_is_what_the_fraction_says(rho, k, dynamic):
    """In floating point (1 - 0.8) * 100 is below 20 (audit, 8)."""
    assert mode_of(rho=rho)._dynamic_share(k) == dynamic


def test_a_budget_that_cannot_hold_the_recent_tokens_is_refused():
    with pytest.raises(UsageError, match=r"budget = 64.*4 \+ 80"):
        mode_of(budget=64, m=80)


def test_a_small_budget_shortens_the_recent_tokens_that_were_not_asked_for():
    mode = mode_of(budget=100)
    assert (mode.window, mode.ring) == (44, 48)
    assert mode.k_of(1000) == 52
    assert mode_of(budget=512).window == 128
