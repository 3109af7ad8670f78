"""The pace of a recording."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
from support.app_driver import answers, press, prompt, toasts, typed
from support.fake_view import FakeClient, FakeView

from kvchat.cli.chat import ENGINE
from kvchat.errors import UsageError
from kvchat.paths import bundled_recording
from kvchat.protocol.messages import MAX_PACE, Pace
from kvchat.tui.replay import SLOWEST, Replay
from kvchat.tui.state import Phase
from kvchat.tui.widgets.bars import KeyHints, ModeBar
from kvchat.tui.widgets.composer import Prompt


@pytest.fixture
def replay():
    return Replay("demo", FakeClient(), FakeView())


def test_speed_and_pause(replay):
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


def test_an_engine_started_again_gets_the_pace(replay):
    replay.begin()
    assert replay.client.sent == []
    replay.set_speed(4)
    replay.begin()
    assert replay.client.sent == [Pace(4), Pace(4)]


def test_speeds_are_true_until_the_pace_is_changed(replay):
    replay.begin()
    assert replay.is_real_time
    replay.pause()
    replay.pause()
    assert not replay.is_real_time
    replay.begin()
    assert replay.is_real_time


def test_only_a_recording_refuses_questions(replay):
    with pytest.raises(UsageError, match=r"recording.*`kvchat`"):
        replay.refuse_question()
    Replay("", FakeClient(), FakeView()).refuse_question()


def test_without_a_recording_there_is_nothing_to_pause():
    with pytest.raises(UsageError, match="replayed"):
        Replay("", FakeClient(), FakeView()).pause()


async def test_a_replay_says_that_it_is_one_and_takes_no_question(running, config):
    config = changed(config, engine_command=(*ENGINE, str(bundled_recording())), replay="demo.jsonl.gz")
    async with running(config, size=(80, 24), ready=False) as (app, _pilot, until):
        chat = app.chat
        await until(lambda: "▶ recording  smollm2" in chat.query_one(ModeBar).render().plain)
        await until(lambda: " F10 pause  ^↑ faster  ^↓ slower " in chat.query_one(KeyHints).render().plain)
        press(app, "f10")
        await until(lambda: app.controller.replay.is_paused)
        press(app, "enter")
        await until(lambda: "This is a recording: there is no model to answer" in toasts(app))
        app.clear_notifications()
        typed(app, "hello there")
        await until(lambda: "This is a recording: there is no model to answer" in toasts(app))
        assert (len(app.controller.answers.queue), prompt(app).text) == (0, "hello there")


async def test_a_question_sent_while_the_recording_asks_its_own_comes_back(running, config):
    config = changed(config, engine_command=(*ENGINE, str(bundled_recording())), replay="demo.jsonl.gz")
    async with running(config, ready=False) as (app, _pilot, until):
        await until(lambda: app.controller.state.phase is Phase.READY)
        prompt(app).insert("mine")
        prompt(app).action_send()
        await app.controller.answers.ask("theirs")
        await until(lambda: prompt(app).text == "mine")
        assert app.chat.query_one(Prompt).prompts.older("") is None


async def test_a_chat_with_a_model_has_no_sign_of_a_replay(running):
    async with running() as (app, _pilot, until):
        await until(lambda: "F6 mode" in app.chat.query_one(KeyHints).render().plain)
        assert "F10" not in app.chat.query_one(KeyHints).render().plain
        assert "recording" not in app.chat.query_one(ModeBar).render().plain


async def test_the_demonstration_plays_in_the_application(running, config):
    config = changed(config, engine_command=(*ENGINE, str(bundled_recording())), replay="demo.jsonl.gz")
    async with running(config, ready=False) as (app, _pilot, until):
        app.controller.replay.set_speed(64)
        await until(lambda: len(app.controller.state.conversation.stats) == 8)
        conversation = app.controller.state.conversation
        forgotten, recalled = (message.text for message in conversation.path[-5:-1:2])
        assert "7419" not in forgotten
        assert "7419" in recalled
        assert app.controller.state.mode == "full"
        press(app, "f10")
        await until(lambda: app.controller.replay.is_paused and answers(app))
