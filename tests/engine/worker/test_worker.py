import io
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest
from support.fake_session import PIECES, FakeLoader, FakeSession
from support.message import lacks
from support.patience import PATIENCE_S, wait_until
from support.streams import read_event
from support.worker_child import CHAT, Child, tick

from kvchat.engine import worker
from kvchat.errors import DoesNotFitError
from kvchat.protocol import wire
from kvchat.protocol.figures import Gpu, MemoryPlan, ModeNeed, Planned, Proposal, Snapshot
from kvchat.protocol.messages import (
    Details,
    Failed,
    Finished,
    Forget,
    KeepPages,
    Load,
    Loaded,
    Loading,
    Peek,
    Peeked,
    Plan,
    Resume,
    Resumed,
    Started,
    Stop,
    Switch,
    Switched,
    SwitchRefused,
    Text,
    Tokenize,
    Tokenized,
    Watch,
)


def test_invalid_command_ends_the_worker_with_the_reason(capsys):
    server = worker.Server(io.BytesIO(), FakeLoader(FakeSession()))
    server.read(io.BytesIO(b"\xff" * 8))
    assert server._inbox.closed
    assert "protocol" in capsys.readouterr().err


def test_conversations_are_resumed_and_forgotten(child, session):
    child.send(Resume("a", CHAT.turns), Resume("b", CHAT.turns))
    assert [child.until(Resumed)[-1].conversation for _ in "ab"] == ["a", "b"]
    child.send(Forget("a"), CHAT)
    assert not any(isinstance(event, Failed) for event in child.until(Finished))
    assert session.resumed == [("b", CHAT.turns)]


def test_conversations_may_be_forgotten_without_a_model(clock):
    with closing(Child(FakeLoader(FakeSession()), clock)) as child:
        child.send(Forget("a"), CHAT)
        assert len(child.until(Failed)) == 1  # of the question only
        child.send(Load("bundled"))
        assert not any(isinstance(event, Failed) for event in child.until(Loaded))


def test_load_passes_settings_on_and_answers_stream(child, session):
    assert session.loaded == Load("bundled", mode="speculative", given={"speculative": {"budget": 128}})
    assert isinstance(child.until(Snapshot)[-1], Snapshot)
    child.send(CHAT)
    events = child.until(Finished)
    assert isinstance(events[0], Started)
    assert "".join(e.text for e in events if isinstance(e, Text)) == events[-1].text == "".join(PIECES)
    assert session.asked == [(CHAT.turns, CHAT.sampling)]


def test_text_comes_in_batches_before_the_next_event(session, child, clock):
    session.pieces, session.on_token = ["x"] * 100, lambda _session, _n: tick(clock, 0.001)
    child.send(CHAT)
    events = child.until(Finished)
    texts = [e for e in events if isinstance(e, Text)]
    assert sum(e.tokens for e in texts) == len("".join(e.text for e in texts)) == 100
    assert len(texts) <= 2 + 100 * 0.001 / worker.TEXT_S


def test_failed_snapshot_does_not_end_the_answer(child, session, monkeypatch):
    def no_memory():
        raise DoesNotFitError("Memory ran out.", "None is left.", "Close something.")

    child.until(Snapshot)
    monkeypatch.setattr(session, "snapshot", no_memory)
    child.send(CHAT)
    events = child.until(Finished)
    assert events[-1].reason == "eos"
    assert not any(isinstance(event, Failed) for event in events)
    failed = child.until(Failed)[-1]  # of the one after the answer; the next one may already be due
    assert (failed.title, failed.aside) == ("Memory ran out.", True)


def test_idle_worker_tries_a_failing_snapshot_once(child, session, monkeypatch):
    tried, snapshot = [], replace(session.snapshot(), gpu=Gpu("H100"))

    def fail():
        tried.append(1)
        if len(tried) > 1:
            raise RuntimeError("NVML is gone.")
        return snapshot

    child.until(Snapshot)
    monkeypatch.setattr(session, "snapshot", fail)
    monkeypatch.setattr(worker, "IDLE_SNAPSHOT_S", 0.01)
    child.send(Stop())
    child.until(Failed)
    time.sleep(0.2)
    assert len(tried) == 2


def test_snapshots_are_rare_and_details_rarer_and_only_if_watched(clock):
    output = io.BytesIO()
    server = worker.Server(output, FakeLoader(FakeSession(["x"] * 100, lambda _s, _n: tick(clock, 0.01))), clock)

    def sent(*commands, kind=Details):
        output.seek(0)
        output.truncate()
        for command in commands:
            server._do(command)
        output.seek(0)
        return sum(isinstance(event, kind) for event in iter(lambda: read_event(output), None))

    assert sent(Watch(True)) == 0, "there is no model"
    assert sent(Load()) == 1
    assert 2 <= sent(CHAT) <= 4  # a second of tokens, and one after the answer
    assert sent(Watch(True)) == 1
    assert sent(Watch(False), CHAT) == 0
    assert 9 <= sent(CHAT, kind=Snapshot) <= 12  # one second of tokens, and one after the answer


@pytest.mark.parametrize("gpu", [None, Gpu("H100")])
def test_idle_worker_sends_snapshots_only_with_a_gpu(gpu, child, session, monkeypatch):
    child.until(Snapshot)
    polls, snapshot = [], replace(session.snapshot(), gpu=gpu)
    monkeypatch.setattr(session, "snapshot", lambda: polls.append(1) or snapshot)
    monkeypatch.setattr(worker, "IDLE_SNAPSHOT_S", 0.01)
    child.send(Stop())  # wakes it
    for _ in range(3 if gpu else 1):
        child.until(Snapshot)
    if gpu is None:  # one after the last command, for late prices
        wait_until(lambda: polls)
        time.sleep(0.2)
        assert len(polls) <= 2  # the load's may be as late; a worker that keeps polling asks for twenty
    child.send(CHAT)
    child.until(Finished)
    child.until(Snapshot)


def test_stop_in_an_answer_keeps_the_text_so_far(session, child):
    def stop_after_two(s, n):
        if n == 2:
            child.send(Stop())
            assert s.canceled.wait(PATIENCE_S)  # by the reader thread, at once

    session.on_token = stop_after_two
    child.send(CHAT)
    finished = child.until(Finished)[-1]
    assert (finished.reason, finished.text) == ("stopped", "The quick")


def test_late_stop_stops_nothing(child):
    child.send(CHAT)
    child.until(Finished)
    child.send(Stop(), Peek(1, 2))
    child.until(Peeked)
    child.send(CHAT)
    assert child.until(Finished)[-1].reason == "eos"


def test_switch_and_peek_are_done_between_two_tokens_whatever_waits_before_them(session, child):
    def send_at_two(_session, n):
        if n == 2:
            child.send(Resume("a", CHAT.turns), Forget("a"), Switch("streaming", {"budget": 256}), Peek(3, 5))
            wait_until(lambda: len(child.server._inbox._commands) >= 4)

    session.on_token = send_at_two
    child.send(CHAT)
    events = child.until(Finished)
    switched = next(i for i, e in enumerate(events) if isinstance(e, Switched))
    assert events[switched] == Switched("speculative", "streaming", {"budget": 256}, 7, 0, 0.0)
    assert events[switched + 1] == Peeked(3, 5, "[3:5]")
    assert "".join(e.text for e in events[:switched] if isinstance(e, Text)) == "The quick brown"
    assert events[-1].reason == "eos"
    child.until(Resumed)


def test_refused_switch_names_the_current_mode(session, child):
    session.failure = DoesNotFitError("Too small.", "It needs 96.")
    child.send(Switch("streaming", {"budget": 64}))
    assert child.until(SwitchRefused)[-1] == SwitchRefused("speculative", str(session.failure))


def test_second_chat_and_its_switch_wait_for_the_first(session, child):
    def send_at_one(s, n):
        if len(s.asked) == 1 and n == 1:
            child.send(CHAT, Switch("full"))
            wait_until(lambda: len(child.server._inbox._commands) >= 2)

    session.on_token = send_at_one
    child.send(CHAT)
    first, second = child.until(Finished), child.until(Finished)
    assert not any(isinstance(e, Switched) for e in first)
    assert any(isinstance(e, Switched) for e in second)


def test_errors_become_failures_and_the_worker_continues(session, child, capfd):
    session.error = DoesNotFitError("Too long.", "5 of 4 tokens.", "Shorten it.")
    child.send(CHAT)
    assert child.until(Failed)[-1] == Failed("Too long.", "5 of 4 tokens.", "Shorten it.", "DoesNotFitError")
    session.error = ZeroDivisionError("oh")
    child.send(CHAT)
    events = child.until(Failed)
    assert not lacks(events[-1].detail + events[-1].hint, "ZeroDivisionError: oh", "/restart")
    assert "".join(e.text for e in events if isinstance(e, Text)) == "The quick"
    assert "Traceback" in capfd.readouterr().err
    session.error = None
    child.send(CHAT)
    child.until(Finished)


def test_error_that_cannot_be_logged_is_still_reported(session, child, monkeypatch):
    monkeypatch.setattr(session, "error", ZeroDivisionError("oh"))
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        child.send(CHAT)
        assert "ZeroDivisionError" in child.until(Failed)[-1].detail
        monkeypatch.undo()
        with suppress(OSError):
            full.close()


def test_failures_outside_an_answer_are_marked_aside(session, child, monkeypatch):
    def full(*_):
        raise DoesNotFitError("The disk is full.")

    monkeypatch.setattr(session, "forget", full)
    monkeypatch.setattr(session, "keep_pages", full)
    child.send(Forget("a"), KeepPages("int8"))
    assert [child.until(Failed)[-1].aside for _ in range(2)] == [True, True]
    session.error = DoesNotFitError("Too long.")
    child.send(CHAT)
    assert child.until(Failed)[-1].aside is False


def test_every_failure_without_a_model_is_fatal(clock):
    child = Child(FakeLoader(DoesNotFitError("Too big.")), clock)
    child.send(Load("huge"), CHAT)
    assert child.until(Failed) == [Loading("starting PyTorch"), Failed("Too big.", kind="DoesNotFitError", fatal=True)]
    assert [failed.fatal for failed in child.until(Failed)] == [True]
    child.close()


def test_closing_stdin_ends_a_running_answer(session, child):
    session.pieces = ["x"] * 1_000_000

    def close_at_three(s, n):
        if n == 3:
            child.commands.close()
            assert s.canceled.wait(PATIENCE_S)

    session.on_token = close_at_three
    child.send(CHAT)
    assert child.until(Finished)[-1].text == "xxx"
    child.close()
    assert session.closed


def test_tokenize_returns_all_tokens_of_a_prompt(child, session):
    session.tokenize = lambda turns, args: [5, 6, 7]
    child.send(Tokenize(CHAT.turns))
    assert child.until(Tokenized)[-1] == Tokenized((5, 6, 7))


# ---- Replacing the model: loads, refusals, stops, plans


PLAN = MemoryPlan(
    "other", "Fake", "cpu", "float32", 4096, {"none": 64}, {"full": ModeNeed(32, {})}, 0, 8, 32, 0, 999, 999,
    proposal=Proposal("none", "full", None, ("nothing",)),
)  # fmt: skip

FIRST, OTHER = Load("first"), Load("other", mode="streaming")


@pytest.fixture
def start_child(clock):
    """Start a child with the first of some sessions loaded and the others queued."""
    with ExitStack() as children:

        def begin(*sessions, has_room=True):
            child = children.enter_context(closing(Child(FakeLoader(*sessions, has_room=has_room), clock)))
            child.send(FIRST)
            child.until(Loaded)
            return child

        yield begin


def stages(events: list[wire.Message]) -> list[str]:
    return [event.stage for event in events if isinstance(event, Loading)]


def test_old_model_stays_until_the_new_one_is_ready(start_child):
    closed_while_loading = []
    old, new = FakeSession(), FakeSession()
    child = start_child(old, new)
    child.server._loader.while_loading = lambda progress: closed_while_loading.append(old.closed)
    child.send(OTHER)
    assert child.until(Loaded)[-1].mode == "streaming"
    assert (closed_while_loading, old.closed) == ([False], True)
    child.send(CHAT)
    child.until(Finished)
    assert (len(old.asked), len(new.asked)) == (0, 1)


def test_failed_load_keeps_the_old_model(start_child):
    old = FakeSession()
    child = start_child(old, DoesNotFitError("Too big."))
    child.send(OTHER)
    assert child.until(Failed)[-1] == Failed("Too big.", kind="DoesNotFitError", fatal=False)
    assert child.until(Loaded)[-1] == old.info
    child.send(CHAT)
    child.until(Finished)
    assert old.asked
    assert not old.closed


def test_unloaded_old_model_is_reloaded_after_a_failed_load(start_child):
    old, again = FakeSession(), FakeSession()
    child = start_child(old, DoesNotFitError("Too big."), again, has_room=False)
    child.send(OTHER)
    assert stages(child.until(Failed))[-1].startswith("unloading fake")
    assert old.closed
    assert stages(child.until(Loaded)) == ["loading first again"]
    assert again.loaded == FIRST


def test_failed_reload_of_the_old_model_is_fatal(start_child):
    child = start_child(FakeSession(), *[DoesNotFitError("Too big.")] * 2, has_room=False)
    child.send(OTHER)
    assert [child.until(Failed)[-1].fatal for _ in range(2)] == [False, True]


def test_load_is_stopped_at_its_next_stage(start_child):
    old = FakeSession()
    child = start_child(old, FakeSession())

    def loading(progress):
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


def test_stop_before_a_silent_load_begins_stops_it(clock):
    events, loader = io.BytesIO(), FakeLoader(FakeSession())
    loader.open_session = lambda load, progress: loader.sessions[0]
    server = worker.Server(events, loader, clock)
    server._inbox.put(FIRST)
    server._inbox.put(Stop())
    server._do(server._inbox.get(0))
    events.seek(0)
    stopped = Failed("Loading first was stopped.", hint="/model loads one.", fatal=True)
    assert [read_event(events), read_event(events)][1] == stopped
    assert server._session is None


def test_plans_and_refused_plans_are_answered(child):
    child.server._loader.planned = PLAN
    child.send(Plan(OTHER))
    assert child.until(Planned)[-1] == Planned("other", PLAN)
    assert child.server._loader.in_use == [child.server._session.snapshot()]
    child.server._loader.planned = DoesNotFitError("Too long.")
    child.send(Plan(OTHER), CHAT)
    assert child.until(Planned)[-1] == Planned("other", None, "Too long.")
    child.until(Finished)
