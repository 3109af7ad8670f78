"""Freeze's timers against the paper's numbers and a plain Python simulation of the definition."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from support.freeze_reference import Simulation
from support.freeze_run import EVERYTHING, TIMERS_ONLY, FreezeRun, with_rule
from support.memory_faults import NO_MEMORY, MemoryRunsOut

from kvchat.config.modes import FreezeParameters, parse
from kvchat.kv.inspect import attended
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes import freeze, freeze_timers
from kvchat.kv.modes.base import LEVELS
from kvchat.kv.modes.freeze_timers import CpuTimers, Timers

PAPER = parse("freeze", {"profile": "paper"}).model_dump()


def simulated(prompt: int, steps: int):
    """Run the paper's profile next to its simulation; yields the number of active tokens after each step."""
    run, simulation = FreezeRun(profile="paper"), Simulation(PAPER)
    run.prefill(prompt)
    simulation.total = prompt
    for _ in range(steps):
        run.step()
        simulation.total += 1
        simulation.step(dict.fromkeys(simulation.active(), 0.0))
        assert run.active() == simulation.active()
        yield len(run.active())
    run.check()


@pytest.mark.parametrize("prompt", [14, 20])
def test_active_tokens_match_the_papers_tables_and_curve(prompt):
    active = dict(enumerate(simulated(prompt, 500), 1))
    if prompt == 14:
        curve = {10: 24, 40: 50, 100: 76, 200: 105, 300: 130, 400: 150, 500: 170}
        assert {step: active[step] for step in curve} == curve
        assert active[514 - 14] == 170
    assert active[269 - prompt] == 119


def test_the_papers_algorithm_works_after_a_long_prompt():
    """All tokens freeze and return in the same steps; none may wait for room (audit, 17)."""
    active = list(simulated(1500, 60))
    assert max(active[10:]) > 1000
    assert min(active) < 60


@pytest.mark.parametrize("windowed", [False, True])
def test_the_default_rule_matches_the_simulation(windowed):
    params = {"K": 10, "tau": 0.8}
    with with_rule(floor=40, stagger=8, recalls=False):
        run = FreezeRun(strength=0.8, windowed=windowed, **params)
        simulation = Simulation(parse("freeze", params).model_dump(), pinned={50, 60})
        run.prefill(120, (50, 60))
    simulation.total = 120
    for _ in range(80):
        read = simulation.active() | {simulation.total}
        run.step()
        simulation.total += 1
        assert {j for j in read if j < simulation.total} == simulation.active()
        simulation.step(run.relevance(simulation.active(), 4))
        assert run.active() == simulation.active(), f"token {simulation.total}"
    run.check()
    assert 40 <= len(run.active()) < 200
    assert {0, 1, 2, 3, 50, 60} <= run.active()


def test_all_expired_tokens_return_at_once():
    """Their number is not capped (audit, 16)."""
    run = FreezeRun(rule=TIMERS_ONLY, **EVERYTHING).begun(1000, 4)
    assert len(run.active()) < 50
    run.step(1)
    assert len(run.active()) > 900
    run.step(1)
    assert int(attended(run.kv.state, 0)[0].sum()) > 900


@pytest.mark.parametrize("level", LEVELS[:3])
def test_each_level_restores_its_tokens(level):
    run = FreezeRun(rule=TIMERS_ONLY, **EVERYTHING).begun(150, 90)
    timers = run.kv.mode.timers
    frozen = timers.frozen[:240].clone()
    c, d, since = timers.detections[:240].clone(), timers.timer[:240].clone(), timers.since[:240].clone()
    run.recover(level)
    expected = {"SR": frozen & (d > 1), "WR": frozen & (since >= 176), "FR": frozen}[level]
    assert torch.equal(timers.frozen[:240], frozen & ~expected)
    assert expected.any()
    if level == "FR":
        assert torch.equal(timers.detections[:240], torch.where(c > 0, c // 2, c))
    run.check()


def fails(run: FreezeRun, place: int) -> bool:
    """Whether memory ran out at operation ``place`` of a step; if so, the next step gets the same K/V."""
    drawn, keys, query = run.random.get_state(), run.keys.copy(), run.query
    try:
        with MemoryRunsOut(place):
            run.step()
    except NO_MEMORY:
        run.random.set_state(drawn)
        run.keys, run.query = keys, query
        return True
    return False


@pytest.mark.parametrize(
    ("params", "compiled"), [({}, True), ({"budget": 90, "K": 16}, False), ({"profile": "paper"}, True)]
)
def test_a_failed_step_leaves_the_timers_unchanged(params, compiled, monkeypatch, count):
    """A retried step used to count twice and to look for pages with a query whose token is not stored."""
    if not compiled:
        for module in (freeze, freeze_timers):
            monkeypatch.setattr(module, "freeze_loops", lambda: None)
    run, other = (FreezeRun(strength=1.0, **params).begun(200, 60) for _ in range(2))
    total, failed = run.kv.total, 0
    before = [tensor[:total].clone() if tensor.dim() else tensor.clone() for tensor in run.kv.mode.timers.states()]
    while fails(run, failed + 1):
        failed += 1
        now = [tensor[:total] if tensor.dim() else tensor for tensor in run.kv.mode.timers.states()]
        assert all(map(torch.equal, now, before)), failed
    count["failures of memory"] += failed
    assert failed > 60
    other.step()
    for _ in range(20):
        run.step()
        other.step()
        assert run.active() == other.active()
    run.check()


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize("params", [{}, {"budget": 90, "K": 16}, {"profile": "paper"}])
def test_a_regenerated_answer_reads_the_same_tokens(params, fails_at):
    """The timers used to continue from the first answer."""
    run = FreezeRun(strength=1.0, **params).begun(200, 40)
    drawn = run.random.get_state()

    def answered(new):
        """What the 20th token of an answer reads, after the last ``new`` of the prompt's 290 tokens are processed."""
        run.random.set_state(drawn)
        run.prefill(new)
        run.step(20)
        run.check()
        return run.active()

    answered(50)
    forget(run, 289, fails_at)
    first = answered(1)
    run.recover("FR")
    run.step(30)
    forget(run, 289, fails_at)
    assert answered(1) == first


def test_another_prompt_does_not_restore_earlier_timers():
    run = FreezeRun(strength=1.0).begun(290, 60)
    left = run.active()
    assert left != set(range(350))
    run.truncate(280)
    run.step(9)
    run.prefill(1)
    assert run.active() != set(range(290))


def forget(run: FreezeRun, tokens: int, fails_at: int) -> None:
    with suppress(*NO_MEMORY), MemoryRunsOut(fails_at):
        run.truncate(tokens)
    run.keys = [keys[:, :tokens] for keys in run.keys]


@pytest.mark.parametrize("prompt", [0, 20])
def test_an_empty_conversation_restores_no_timers(prompt):
    timers = Timers(FreezeParameters(), torch.device("cpu"))
    timers.begin_answer(prompt, is_new=bool(prompt))
    timers.truncate(0)
    timers.begin_answer(0, is_new=False)
    assert not timers.frozen.any()


# ---- The CPU's timers, compiled by numba, against those in torch


@pytest.mark.parametrize("profile", ["default", "paper"])
@pytest.mark.parametrize("budget", [None, 150])
def test_compiled_timers_match_torch(profile, budget):
    """200 steps over tokens of random scores, some pinned, protected, hot or retrieved, some slots empty."""
    parameters = FreezeParameters(profile=profile, budget=budget, K=20, tau=0.5, k=0.5)
    cpu, reference = (timers(parameters, torch.device("cpu")) for timers in (CpuTimers, Timers))
    draw = torch.Generator().manual_seed(7)
    protected, pins = (torch.rand(n, generator=draw) < 0.02 for n in (1000, 60))
    pins[-1] = False
    for timers in (cpu, reference):
        timers.rule = replace(timers.rule, floor=min(timers.rule.floor, 120))
        timers.pin(pins, budget)
    for position in range(300, 500):
        for timers in (cpu, reference):
            timers.reserve(position + 1)
        if position == 400:
            cpu.hold.fill_(3), reference.hold.fill_(3)
        read = (~reference.frozen[: position + 1]).nonzero().flatten().to(torch.int32)
        table = torch.nn.functional.pad(read, (0, 5), value=EMPTY)[torch.randperm(len(read) + 5, generator=draw)]
        score = torch.rand(len(table), generator=draw) ** 3 * 2
        score[torch.rand(len(table), generator=draw) < 0.003] = 100.0
        hot = torch.rand(cpu.capacity + 1, generator=draw) < 0.002
        hot &= cpu.index <= position
        at = torch.tensor(position)
        for timers in (cpu, reference):
            timers.observe(at, table, score, protected, hot.clone() if timers.rule.recalls else None)
        for one, other in zip(cpu.states(), reference.states(), strict=True):
            assert torch.equal(
                one[: position + 1] if one.dim() else one, other[: position + 1] if other.dim() else other
            )
    assert 0 < int(reference.frozen.sum()) < 480
