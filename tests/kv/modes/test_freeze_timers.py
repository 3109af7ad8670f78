"""Freeze's timers against the paper's numbers and a simulation in plain Python, written from the definition."""

from __future__ import annotations

import pytest
import torch
from support.freeze_reference import Simulation
from support.freeze_run import EVERYTHING, MEAN, FreezeRun

from kvchat.config.modes import parse
from kvchat.kv.modes.recovery_levels import LEVELS

PAPER = {
    "tau": 0.5, "k": 2.0, "window": 32, "sink": 0, "protect": False, "history": 0, "stagger": 1,
    "same_step": True, "min_active": 0, "smooth": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("prompt", [14, 20])
def test_the_papers_tables_and_curve(prompt):
    run, simulation = FreezeRun(profile="paper"), Simulation(parse("freeze", PAPER).model_dump())
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


def test_the_papers_curve_at_a_thousand_steps():
    run = FreezeRun(profile="paper")
    run.prefill(14)
    run.step(1000)
    assert len(run.active()) == 250


@pytest.mark.parametrize("windowed", [False, True])
def test_the_rule_is_the_simulations(windowed):
    params = {"min_active": 40, "window": 10, "tau": 0.8, "history": 20, "stagger": 8, **MEAN}
    run = FreezeRun(strength=0.8, windowed=windowed, **params)
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


def test_first_freezes_are_spread_over_time():
    left = []
    for stagger in (1, 8):
        run = FreezeRun(**{**EVERYTHING, "stagger": stagger})
        run.prefill(232)
        run.step(4)
        left.append(236 - len(run.active()))
    assert left == [197, 25]


def test_at_most_so_many_return_in_a_step():
    run = FreezeRun(**EVERYTHING, moves=5)
    run.prefill(100)
    run.step(4)
    before = len(run.active())
    for _ in range(6):
        frozen = set(range(run.kv.total)) - run.active()
        run.step()
        assert len(frozen & run.active()) <= 5
    assert before < 60
    run.check()


@pytest.mark.parametrize("level", LEVELS[:3])
def test_each_level_restores_what_it_says(level):
    run = FreezeRun(**EVERYTHING)
    run.prefill(150)
    run.step(90)
    (timers,) = run.kv.mode.timers
    frozen = timers.frozen[:240].clone()
    c, d, since = timers.detections[:240].clone(), timers.timer[:240].clone(), timers.since[:240].clone()
    run.relax(level)
    expected = {"SR": frozen & (d > 1), "WR": frozen & (since >= 176), "FR": frozen}[level]
    assert torch.equal(timers.frozen[:240], frozen & ~expected)
    assert expected.any()
    if level == "FR":
        assert torch.equal(timers.detections[:240], torch.where(c > 0, c // 2, c))
    run.check()
