"""A decoded token is computed on as many threads as other processes leave cores for; a prompt on all."""

import math
import os

import pytest
import torch

from kvchat.bench.frame import parsed
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.kv.modes import build
from kvchat.models.quantize.rows import PAUSE_S, SAMPLE_S, ThreadBudget


class Machine:
    """A machine with some cores, whose processor times the test sets."""

    def __init__(self, cores, stat, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        self.now, self.own, self.idle, self.cores, self.stat = 0.0, 0.0, 0.0, cores, stat
        self.write()

    def write(self):
        busy = self.now * self.cores - self.idle
        each = [round(1000 + os.sysconf("SC_CLK_TCK") * share / self.cores) for share in (busy, self.idle)]
        lines = (f"cpu{n} {each[0]} 0 0 {each[1]} 0 0 0 0 0 0" for n in range(self.cores))
        self.stat.write_text("\n".join(lines))

    def passed(self, seconds, own=0.0, others=0.0):
        """Let ``seconds`` pass, in which this process and others keep some cores busy."""
        self.now += seconds
        self.own += own * seconds
        self.idle += (self.cores - own - others) * seconds
        self.write()

    def thread_budget(self, **options):
        return ThreadBudget(torch.device("cpu"), lambda: self.now, lambda: self.own, self.stat, **options)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return lambda cores: Machine(cores, tmp_path / "stat", monkeypatch)


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eight(machine, eight_threads):
    """A machine with eight cores, and its thread budget after a first sample."""
    here = machine(8)
    free = here.thread_budget()
    threads_in(free)
    return here, free


def threads_in(free):
    with free:
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
        (8, 0.2, 7.8, 1),  # one is always there
        (16, 8, 6, 8),  # more cores than threads
        (16, 4, 12, 4),
        (2, 1, 1, 1),
    ],
)
def test_there_is_a_thread_for_each_core_that_others_leave(machine, cores, own, others, threads):
    here = machine(cores)
    free = here.thread_budget()
    assert threads_in(free) == 8
    here.passed(2 * SAMPLE_S, own, others)
    assert threads_in(free) == threads


def test_they_come_back_when_the_others_have_gone(eight):
    here, free = eight
    seen = []
    for others in (0, 3, 3, 0, 0):
        here.passed(2 * SAMPLE_S, 8 - others, others)
        seen.append(threads_in(free))
    assert seen == [8, 5, 5, 8, 8]


def test_where_there_are_no_pauses_long_work_says_something(machine, eight_threads):
    here = machine(8)
    free = here.thread_budget(pause=math.inf)
    threads_in(free)
    here.passed(60, 2, 6)
    assert threads_in(free) == 2


def test_what_others_did_in_a_pause_says_nothing(eight):
    here, free = eight
    here.passed(PAUSE_S + 0.1, 0, 8)
    assert threads_in(free) == 8
    here.passed(2 * SAMPLE_S, 4, 4)
    assert threads_in(free) == 4


def test_a_look_is_not_taken_for_every_token(eight):
    here, free = eight
    for _ in range(3):
        here.passed(SAMPLE_S / 4, 4, 4)
        assert threads_in(free) == 8
    here.passed(SAMPLE_S / 2, 4, 4)
    assert threads_in(free) == 4


def test_a_step_that_fails_gives_the_threads_back(eight):
    here, free = eight
    here.passed(2 * SAMPLE_S, 4, 4)
    seen = []

    def fail():
        with free:
            seen.append(torch.get_num_threads())
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert seen == [4]
    assert torch.get_num_threads() == 8


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize("why", ["OMP_DYNAMIC", "a GPU", "no stat"])
def test_nothing_changes_where_it_is_not_wanted_or_not_known(machine, monkeypatch, why):
    here = machine(8)
    if why == "OMP_DYNAMIC":
        monkeypatch.setenv(why, "FALSE")
    free = ThreadBudget(torch.device("cuda"), stat=here.stat) if why == "a GPU" else here.thread_budget()
    threads_in(free)
    here.passed(2 * SAMPLE_S, 2, 6)
    if why == "no stat":
        here.stat.unlink()
    assert threads_in(free) == 8


@pytest.mark.usefixtures("eight_threads")
def test_a_token_is_decoded_on_what_is_left_and_a_prompt_read_on_all(model, machine):
    runner = ModelRunner(model, build(parsed("full"), geometry_of(model), traits_of(model)))
    here = machine(8)
    runner.thread_budget = here.thread_budget()
    seen = []
    run = runner._run
    runner._run = lambda *a, **k: seen.append(torch.get_num_threads()) or run(*a, **k)

    def read():
        for _ in runner.prefill([1, 2, 3]):
            pass

    read()
    here.passed(2 * SAMPLE_S, 5, 3)
    runner.step(4)
    read()
    runner.step(5)
    assert seen == [8, 5, 8, 5], "the first token knows what the prompt saw"
