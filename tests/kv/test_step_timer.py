"""Times of recall: by the clock on a CPU, by events on a GPU, hidden and exposed apart."""

from __future__ import annotations

import pytest
import torch

from kvchat.kv.transfer import EVERY, RecallTime, StepTimer


class Clock:
    """Events of a device whose work takes the time that the test says, and is done when it says."""

    now = 0.0
    done = True

    def __init__(self, enable_timing: bool, external: bool) -> None:
        assert enable_timing
        assert external, "an event of a graph that is not external is never timed"

    def record(self) -> None:
        self.at = Clock.now

    def query(self) -> bool:
        return Clock.done

    def elapsed_time(self, end: Clock) -> float:
        return end.at - self.at


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> StepTimer:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(Clock, "done", True)
    return StepTimer(torch.device("cuda"))


def forward(timer: StepTimer, kind: str, exposed: float, hidden: float, waited: float) -> None:
    timer.begin_forward(kind)
    for span, milliseconds in (
        (timer.copying(), exposed),
        (timer.copying(hidden=True), hidden),
        (timer.waiting(), waited),
    ):
        with span:
            Clock.now += milliseconds
    timer.end_step(kind)


def test_a_correction_is_exposed_and_a_speculation_hidden_but_for_the_wait(timer):
    forward(timer, "a", exposed=2.0, hidden=5.0, waited=1.0)
    assert not timer.steps
    timer.begin_step("a")
    (step,) = timer.steps
    assert step == (pytest.approx(0.007), pytest.approx(0.003))


def test_a_wait_for_more_than_copies_is_no_more_than_all_of_them(timer):
    forward(timer, "a", exposed=0.0, hidden=2.0, waited=9.0)
    timer.begin_step("a")
    assert timer.steps[0].exposed == timer.steps[0].total == pytest.approx(0.002)


def test_a_replayed_graph_is_timed_by_the_events_of_its_kind(timer):
    forward(timer, "copies", exposed=3.0, hidden=0.0, waited=0.0)
    timer.begin_step("a")
    timer.begin_forward("rests")
    timer.end_step("rests")
    timer.begin_step("a")
    assert len(timer.steps) == 1, "a step that copied nothing has no time"
    timer.end_step("copies")  # a replay: no Python ran in between
    timer.begin_step("a")
    assert [step.total for step in timer.steps] == [pytest.approx(0.003)] * 2
    assert (timer.timed, timer.seconds) == (3, pytest.approx(0.006))


def test_the_host_waits_for_no_figure(timer, monkeypatch):
    forward(timer, "a", exposed=3.0, hidden=0.0, waited=0.0)
    monkeypatch.setattr(Clock, "done", False)
    timer.begin_step("a")
    assert not timer.steps
    monkeypatch.setattr(Clock, "done", True)
    timer.begin_step("a")
    assert not timer.steps, "the events may belong to a later step by now"
    assert timer.timed == 0


def test_of_many_steps_one_in_some_is_timed_and_the_others_record_no_event(timer):
    timed = []
    for step in range(3 * EVERY + 1):
        timer.begin_step("a")
        forward(timer, f"timed {timer.times}", exposed=float(step), hidden=0.0, waited=0.0)
        timed += [step] * timer.times
    assert timed == [0, 1, EVERY, 2 * EVERY, 3 * EVERY]
    timer.begin_step("a")
    assert [round(1000 * step.total) for step in timer.steps] == timed[1:]
    assert timer.timed == len(timed)


def test_another_mode_begins_anew(timer):
    forward(timer, "a", exposed=3.0, hidden=0.0, waited=0.0)
    timer.clear()
    timer.begin_step("a")
    assert not timer.steps


def test_a_cpu_copies_while_the_step_waits():
    timer = StepTimer(torch.device("cpu"))
    with timer.copying(hidden=True):
        sum(range(1000))
    timer.end_step("a")
    timer.begin_step("a")
    (step,) = timer.steps
    assert isinstance(step, RecallTime)
    assert step.total == step.exposed > 0
