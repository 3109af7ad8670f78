"""The timers of a CPU, of which numba compiles the passes, against those in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvchat.config.modes import FreezeParameters
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes.freeze_timers import CpuTimers, Timers


@pytest.mark.parametrize("profile", ["default", "paper"])
@pytest.mark.parametrize("budget", [None, 150])
def test_the_timers_of_a_cpu_find_what_the_reference_finds(profile, budget):
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
