"""Replayed recordings: their pace, and the replaying engine."""

import io
import os
import threading
import time
from dataclasses import replace as changed

import pytest
from support.app_driver import press, prompt, submit, toasts
from support.fake_view import FakeClient, FakeView
from support.streams import read_event

from kvchat.cli.chat import ENGINE
from kvchat.errors import UsageError
from kvchat.paths import bundled_recording
from kvchat.protocol import wire
from kvchat.protocol.figures import Planned, Stats
from kvchat.protocol.messages import (
    MAX_PACE,
    Asked,
    Chat,
    Compare,
    Details,
    Failed,
    Finished,
    Load,
    Pace,
    Plan,
    Replayed,
    Switch,
    Switched,
    SwitchRefused,
    Text,
    Turn,
    Variant,
    Watch,
)
from kvchat.protocol.recording import Entry
from kvchat.replay.engine import Player
from kvchat.tui.replay import SLOWEST, Replay
from kvchat.tui.state import Phase
from kvchat.tui.widgets.bars import KeyHints, ModeBar


@pytest.fixture
def replay():
    return Replay("demo", FakeClient(), FakeView())


def test_speed_has_limits_and_survives_a_pause(replay):
    for _ in range(9):
        replay.change(2)
    assert replay.speed == MAX_PACE
    replay.pause()
    replay.pause()
    replay.set_speed(0.5)
    assert [command.speed for command in replay.client.sent[-3:]] == [0.0, MAX_PACE, 0.5]
    for wrong in (0.0, -1.0, SLOWEST / 2, MAX_PACE * 2, float("nan")):
        with pytest.raises(UsageError):
            replay.set_speed(wrong)


def test_a_restarted_engine_keeps_a_changed_pace(replay):
    replay.begin()
    assert replay.is_real_time
    assert replay.client.sent == []
    replay.pause()
    replay.pause()
    assert not replay.is_real_time
    replay.begin()
    assert replay.is_real_time
    replay.set_speed(4)
    replay.begin()
    assert replay.client.sent[-2:] == [Pace(4), Pace(4)]


def test_only_recordings_refuse_questions_and_can_pause(replay):
    with pytest.raises(UsageError, match=r"recording.*`kvchat`"):
        replay.refuse_question()
    chat = Replay("", FakeClient(), FakeView())
    chat.refuse_question()
    with pytest.raises(UsageError, match="replayed"):
        chat.pause()


async def test_a_replay_refuses_questions_and_plays_to_the_end(running, config):
    config = changed(config, engine_command=(*ENGINE, str(bundled_recording())), replay="demo.jsonl.gz")
    async with running(config, size=(80, 24), ready=False) as (app, _pilot, until):
        chat, replay = app.chat, app.controller.replay
        await until(lambda: "▶ recording  smollm2" in chat.query_one(ModeBar).render().plain)
        await until(lambda: " F10 pause  ^↑ faster  ^↓ slower " in chat.query_one(KeyHints).render().plain)
        press(app, "f10")
        await until(lambda: replay.is_paused)
        press(app, "enter")
        await until(lambda: "This is a recording: there is no model to answer" in toasts(app))
        app.clear_notifications()
        submit(app, "hello there")
        await until(lambda: "This is a recording: there is no model to answer" in toasts(app))
        assert (len(app.controller.answers.queue), prompt(app).text) == (0, "hello there")
        prompt(app).clear()
        replay.set_speed(64)
        conversation = app.controller.state.conversation
        await until(lambda: len(conversation.stats) == 8 and app.controller.state.phase is Phase.READY)
        forgotten, recalled = (message.text for message in conversation.path[-5:-1:2])
        assert "7419" not in forgotten
        assert "7419" in recalled
        assert app.controller.state.mode == "full"
        prompt(app).insert("mine")
        prompt(app).action_send()
        await app.controller.answers.ask("theirs")  # as the recording asks its own questions
        await until(lambda: prompt(app).text == "mine")
        assert prompt(app).prompts.older("") is None


# ---- The replaying engine: order and timing of events, pace changes, refusals, and its end


CHAT = Chat((Turn("user", "hello"),))


def events_of(entries, commands=()) -> list:
    """The events of a player that received ``commands`` before it started."""
    events = io.BytesIO()
    player = Player(entries, events)
    player.read(io.BytesIO(b"".join(map(wire.encode, commands))))
    player._closed = False
    thread = threading.Thread(target=player.play)
    thread.start()
    while b"Replayed" not in events.getvalue():
        time.sleep(0.001)
    player.read(io.BytesIO())
    thread.join(60)
    assert not thread.is_alive()
    events.seek(0)
    bodies = iter(lambda: wire.read(events), None)
    return [wire.decode_event(body) for body in bodies]


def test_events_keep_their_order_and_long_gaps_are_cut():
    entries = [Entry(0.0, Asked("hello")), Entry(0.01, Text("hi", 1)), Entry(5000.0, Finished("eos", "hi", Stats()))]
    began = time.monotonic()
    sent = events_of(entries, [Pace(64.0)])
    assert sent == [*(entry.event for entry in entries), Replayed(5000.0)]
    assert time.monotonic() - began < 60


def test_commands_that_need_a_model_are_refused():
    entries = [Entry(0.0, Switched("full", "sync", {}, 5, 0, 0.0))]
    refused = [Switch("full"), CHAT, Compare(CHAT.turns, (Variant("full"),)), Plan(Load())]
    sent = events_of(entries, refused)
    assert [type(event) for event in sent] == [SwitchRefused, Failed, Failed, Planned, Switched, Replayed]


def test_details_are_answered_even_if_none_were_recorded():
    sent = events_of([Entry(0.0, Asked("hello"))], [Watch(True)])
    assert sent == [Details(0), Asked("hello"), Replayed(0.0)]


def test_a_paused_recording_waits():
    read_end, write_end = os.pipe()
    out, events = os.pipe()
    with (
        open(read_end, "rb") as commands,
        open(write_end, "wb") as stdin,
        open(out, "rb") as stdout,
        open(events, "wb") as sent,
    ):
        player = Player([Entry(0.0, Asked("hello")), Entry(0.5, Text("hi", 1))], sent)
        stdin.write(wire.encode(Pace(0.0)) + wire.encode(Switch("full")))
        stdin.flush()
        threading.Thread(target=player.read, args=(commands,), daemon=True).start()
        assert isinstance(read_event(stdout), SwitchRefused)
        thread = threading.Thread(target=player.play)
        thread.start()
        assert isinstance(read_event(stdout), Asked)
        stdin.write(wire.encode(CHAT) + wire.encode(CHAT))
        stdin.flush()
        assert isinstance(read_event(stdout), Failed), "the first question is the recording's own"
        stdin.write(wire.encode(Pace(64.0)))
        stdin.flush()
        assert isinstance(read_event(stdout), Text)
        assert isinstance(read_event(stdout), Replayed)
        stdin.close()
        thread.join(60)
        assert not thread.is_alive()
