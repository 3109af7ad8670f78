"""Another model in place of the one in use: loaded, refused, stopped, planned for."""

from __future__ import annotations

import io
import time

from support.fake_session import FakeLoader, FakeSession
from support.streams import read_event
from support.worker_child import CHAT, Child, Clock

from kvchat.engine import worker
from kvchat.engine.worker import Progress
from kvchat.errors import DoesNotFitError
from kvchat.protocol import wire
from kvchat.protocol.figures import MemoryPlan, ModeNeed, Planned, Proposal
from kvchat.protocol.messages import (
    Failed,
    Finished,
    Load,
    Loaded,
    Loading,
    Plan,
    Stop,
)

PLAN = MemoryPlan(
    "other", "Fake", "cpu", "float32", 4096, {"none": 64}, {"full": ModeNeed(32, {})}, 0, 8, 32, 0, 999, 999,
    proposal=Proposal("none", "full", None, ("nothing",)),
)  # fmt: skip

FIRST, OTHER = Load("first"), Load("other", mode="streaming")


def replaced(*sessions: FakeSession | BaseException, clock: Clock, has_room: bool = True) -> Child:
    """A child with the first of the sessions loaded, and the others to come."""
    child = Child(FakeLoader(*sessions, has_room=has_room), clock)
    child.send(FIRST)
    child.until(Loaded)
    return child


def stages(events: list[wire.Message]) -> list[str]:
    return [event.stage for event in events if isinstance(event, Loading)]


def test_the_old_model_stays_until_the_new_one_is_ready(clock: Clock) -> None:
    closed_while_loading = []
    old, new = FakeSession(), FakeSession()
    child = replaced(old, new, clock=clock)
    child.server._loader.while_loading = lambda progress: closed_while_loading.append(old.closed)
    child.send(OTHER)
    assert child.until(Loaded)[-1].mode == "streaming"
    assert (closed_while_loading, old.closed) == ([False], True)
    child.send(CHAT)
    child.until(Finished)
    assert (len(old.asked), len(new.asked)) == (0, 1)
    child.close()


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_in_use(clock: Clock) -> None:
    old = FakeSession()
    child = replaced(old, DoesNotFitError("Too big."), clock=clock)
    child.send(OTHER)
    assert child.until(Failed)[-1] == Failed("Too big.", kind="DoesNotFitError", fatal=False)
    assert child.until(Loaded)[-1] == old.info
    child.send(CHAT)
    child.until(Finished)
    assert old.asked
    assert not old.closed
    child.close()


def test_without_room_for_both_the_old_model_is_unloaded_and_comes_back(clock: Clock) -> None:
    old, again = FakeSession(), FakeSession()
    child = replaced(old, DoesNotFitError("Too big."), again, clock=clock, has_room=False)
    child.send(OTHER)
    assert stages(child.until(Failed))[-1].startswith("unloading fake")
    assert old.closed
    assert stages(child.until(Loaded)) == ["loading first again"]
    assert again.loaded == FIRST
    child.close()


def test_if_the_old_model_does_not_come_back_nothing_is_loaded(clock: Clock) -> None:
    child = replaced(FakeSession(), *[DoesNotFitError("Too big.")] * 2, clock=clock, has_room=False)
    child.send(OTHER)
    assert [child.until(Failed)[-1].fatal for _ in range(2)] == [False, True]
    child.close()


def test_a_load_is_stopped_at_its_next_stage(clock: Clock) -> None:
    old = FakeSession()
    child = replaced(old, FakeSession(), clock=clock)

    def loading(progress: Progress) -> None:
        child.send(Stop())
        while True:
            progress("reading")
            time.sleep(0.001)

    child.server._loader.while_loading = loading
    child.send(OTHER)
    stopped = child.until(Failed)[-1]
    assert "other" in stopped.title
    assert not stopped.fatal
    assert child.until(Loaded)[-1] == old.info
    child.close()


def test_a_stop_that_came_before_the_load_began_stops_one_that_reports_nothing(clock: Clock) -> None:
    events, loader = io.BytesIO(), FakeLoader(FakeSession())
    loader.open_session = lambda load, progress: loader.sessions[0]
    server = worker.Server(events, loader, clock)
    server._inbox.put(FIRST, 0)
    server._inbox.put(Stop(), 0)
    server._do(server._inbox.get(0))
    events.seek(0)
    stopped = Failed("Loading first was stopped.", hint="/model loads one.", fatal=True)
    assert [read_event(events), read_event(events)][1] == stopped
    assert server._session is None


def test_a_plan_is_answered_and_a_refusal_of_one_fails_nothing(child: Child) -> None:
    child.server._loader.planned = PLAN
    child.send(Plan(OTHER))
    assert child.until(Planned)[-1] == Planned("other", PLAN)
    assert child.server._loader.in_use == [child.server._session.snapshot()]
    child.server._loader.planned = DoesNotFitError("Too long.")
    child.send(Plan(OTHER), CHAT)
    assert child.until(Planned)[-1] == Planned("other", None, "Too long.")
    child.until(Finished)
