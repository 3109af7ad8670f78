"""Decode uses as many threads as other processes leave cores free, and prefill uses all."""

import math
import os

import pytest
import torch

from kvchat.bench.frame import parsed
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.kv.modes import build
from kvchat.models.quantize.rows import PAUSE_S, SAMPLE_S, ThreadBudget


class Machine:
    """A machine with some cores, whose CPU times the test sets."""

    def __init__(self, cores, stat, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        self.now, self.own, self.idle, self.cores, self.stat = 0.0, 0.0, 0.0, cores, stat
        self.write()

    def write(self):
        busy = self.now * self.cores - self.idle
        each = [round(1000 + os.sysconf("SC_CLK_TCK") * share / self.cores) for share in (busy, self.idle)]
        lines = (f"cpu{n} {each[0]} 0 0 {each[1]} 0 0 0 0 0 0" for n in range(self.cores))
        self.stat.write_text("\n".join(lines))

    def advance(self, seconds, own=0.0, others=0.0):
        """Let ``seconds`` pass, in which this process and others keep some cores busy."""
        self.now += seconds
        self.own += own * seconds
        self.idle += (self.cores - own - others) * seconds
        self.write()

    def thread_budget(self, **options):
        return ThreadBudget(torch.device("cpu"), lambda: self.now, lambda: self.own, self.stat, **options)


@pytest.fixture
def make_machine(tmp_path, monkeypatch):
    return lambda cores: Machine(cores, tmp_path / "stat", monkeypatch)


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eight(make_machine, eight_threads):
    """A machine with eight cores, and its thread budget after a first sample."""
    machine = make_machine(8)
    budget = machine.thread_budget()
    threads_in(budget)
    return machine, budget


def threads_in(budget):
    with budget:
        found = torch.get_num_threads()
    assert torch.get_num_threads() == 8
    return found


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize(
    ("cores", "own", "others", "threads"),
    [
        (8, 8, 0, 8),
        (8, 7.7, 0.3, 8),  # the application draws an answer
        (8, 7, 1, 7),
        (8, 5, 3, 5),
        (8, 4, 4, 4),
        (8, 1, 7, 1),
        (8, 0.2, 7.8, 1),  # at least one
        (16, 8, 6, 8),  # more cores than threads
        (16, 4, 12, 4),
        (2, 1, 1, 1),
    ],
)
def test_threads_match_the_cores_that_others_leave(make_machine, cores, own, others, threads):
    machine = make_machine(cores)
    budget = machine.thread_budget()
    assert threads_in(budget) == 8
    machine.advance(2 * SAMPLE_S, own, others)
    assert threads_in(budget) == threads


def test_threads_come_back_when_other_processes_end(eight):
    machine, budget = eight
    seen = []
    for others in (0, 3, 3, 0, 0):
        machine.advance(2 * SAMPLE_S, 8 - others, others)
        seen.append(threads_in(budget))
    assert seen == [8, 5, 5, 8, 8]


def test_long_samples_count_without_pauses(make_machine, eight_threads):
    machine = make_machine(8)
    budget = machine.thread_budget(pause=math.inf)
    threads_in(budget)
    machine.advance(60, 2, 6)
    assert threads_in(budget) == 2


def test_load_during_a_pause_is_ignored(eight):
    machine, budget = eight
    machine.advance(PAUSE_S + 0.1, 0, 8)
    assert threads_in(budget) == 8
    machine.advance(2 * SAMPLE_S, 4, 4)
    assert threads_in(budget) == 4


def test_load_is_not_sampled_for_every_token(eight):
    machine, budget = eight
    for _ in range(3):
        machine.advance(SAMPLE_S / 4, 4, 4)
        assert threads_in(budget) == 8
    machine.advance(SAMPLE_S / 2, 4, 4)
    assert threads_in(budget) == 4


def test_a_failed_step_restores_the_threads(eight):
    machine, budget = eight
    machine.advance(2 * SAMPLE_S, 4, 4)
    seen = []

    def fail():
        with budget:
            seen.append(torch.get_num_threads())
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert seen == [4]
    assert torch.get_num_threads() == 8


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize("why", ["OMP_DYNAMIC", "a GPU", "no stat"])
def test_threads_stay_if_disabled_unmeasurable_or_on_a_gpu(make_machine, monkeypatch, why):
    machine = make_machine(8)
    if why == "OMP_DYNAMIC":
        monkeypatch.setenv(why, "FALSE")
    budget = ThreadBudget(torch.device("cuda"), stat=machine.stat) if why == "a GPU" else machine.thread_budget()
    threads_in(budget)
    machine.advance(2 * SAMPLE_S, 2, 6)
    if why == "no stat":
        machine.stat.unlink()
    assert threads_in(budget) == 8


@pytest.mark.usefixtures("eight_threads")
def test_decode_uses_free_cores_and_prefill_all_cores(model, make_machine):
    runner = ModelRunner(model, build(parsed("full"), geometry_of(model), traits_of(model)))
    machine = make_machine(8)
    runner.thread_budget = machine.thread_budget()
    seen = []
    run = runner._run
    runner._run = lambda *a, **k: seen.append(torch.get_num_threads()) or run(*a, **k)

    def read():
        for _ in runner.prefill([1, 2, 3]):
            pass

    read()
    machine.advance(2 * SAMPLE_S, 5, 3)
    runner.step(4)
    read()
    runner.step(5)
    assert seen == [8, 5, 8, 5], "the first token uses what was sampled at the prompt"
