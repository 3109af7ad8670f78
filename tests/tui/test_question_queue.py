"""Questions and commands that wait: their order, a stop, an engine that fails, what is taken back."""

from __future__ import annotations

from functools import partial

import pytest
from support.app_driver import press, typed

from kvchat.errors import UsageError
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import (
    Chat,
    Failed,
    Finished,
    Rebuild,
    Rebuilt,
    Stop,
    Switch,
    Text,
)
from kvchat.tui.state import Phase

DONE = Finished("eos", "hi", Stats(generated_tokens=1))


async def test_questions_are_queued_and_sent_in_order(chat):
    for text in ("one", "two", "three"):
        await chat.ask(text)
    assert [question.queued for question in chat.view.questions] == [True] * 3
    await chat.load()
    assert (chat.turns, chat.view.queue) == (["one"], (2, False))
    await chat.controller.handle(DONE)
    await chat.controller.handle(DONE)
    assert (chat.turns, chat.view.queue) == (["one", "hi", "two", "hi", "three"], (0, False))


async def test_commands_wait_beside_questions_in_their_order(chat):
    async def mode(name):
        chat.controller.switch(name)

    await chat.controller.defer("/mode streaming", partial(mode, "streaming"))
    await chat.ask("one")
    await chat.controller.defer("/mode sync", partial(mode, "sync"))
    await chat.controller.defer("/mode freeze", partial(mode, "freeze"))
    await chat.ask("two")
    assert (chat.view.queue, chat.client.sent) == ((5, False), [])
    await chat.load()
    assert [one.removed for one in chat.view.questions] == [True, False, False, False, False]
    await chat.controller.handle(DONE)
    sent = [one.mode if isinstance(one, Switch) else one.turns[-1].content for one in chat.client.sent]
    assert sent == ["streaming", "one", "sync", "freeze", "two"]
    assert chat.view.queue == (0, False)


async def test_a_command_that_waits_is_taken_back_and_takes_the_conversation_up(chat):
    async def rebuild():
        chat.controller.rebuild()

    await chat.controller.defer("/rebuild", rebuild)
    await chat.controller.take_back()
    assert (chat.view.prompt, chat.view.queue) == ("/rebuild", (0, False))
    chat.controller.state.conversation.ask("one")
    chat.controller.state.conversation.answer("hi")
    await chat.controller.defer("/rebuild", rebuild)
    await chat.ask("two")
    await chat.load()
    assert [type(one) for one in chat.client.sent] == [Rebuild]
    await chat.controller.handle(Rebuilt(1, 0.1))
    assert isinstance(chat.client.sent[-1], Chat)


async def test_a_question_asked_while_a_command_that_waited_runs_comes_behind_the_others(chat):
    async def ask_meanwhile():
        await chat.ask("later")

    await chat.controller.defer("/next", ask_meanwhile)
    await chat.ask("one")
    await chat.load()
    assert (chat.turns, chat.view.queue) == (["one"], (1, False))
    await chat.controller.handle(DONE)
    assert chat.turns == ["one", "hi", "later"]


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DOWN])
async def test_a_command_that_is_mounted_when_loading_ends_is_not_forgotten(chat, phase):
    ran = []

    async def change():
        await (chat.load() if phase is Phase.READY else chat.controller.handle(Failed("no model", fatal=True)))

    async def run():
        ran.append("/next")

    chat.view.while_mounting = change
    await chat.controller.defer("/next", run)
    assert (ran, chat.view.prompt) == ((["/next"], "") if phase is Phase.READY else ([], "/next"))


async def test_a_stop_holds_the_queue_until_it_is_released_and_a_new_question_goes_first(chat):
    await chat.load()
    for text in ("one", "two", "three"):
        await chat.ask(text)
    chat.controller.stop()
    await chat.controller.handle(Text("a", 1))
    await chat.controller.handle(Finished("stopped", "a", Stats(generated_tokens=1)))
    assert (chat.phase, chat.turns, chat.view.queue) == (Phase.READY, ["one", "a"], (2, True))
    await chat.ask("now")
    await chat.controller.handle(DONE)
    assert (chat.turns[2:], chat.view.queue) == (["now", "hi"], (2, True))
    await chat.controller.release_queue()
    assert (chat.turns[4:], chat.view.queue) == (["two"], (1, False))


async def test_the_last_queued_question_is_taken_back_unless_another_text_is_begun(chat):
    with pytest.raises(UsageError, match="Nothing is queued"):
        await chat.controller.take_back()
    for text in ("one", "two"):
        await chat.ask(text)
    await chat.controller.take_back()
    assert (chat.view.prompt, chat.view.questions[1].removed, chat.view.queue) == ("two", True, (1, False))
    with pytest.raises(UsageError, match="another text"):
        await chat.controller.take_back()
    await chat.load()
    assert chat.turns == ["one"]


async def test_an_engine_that_fails_holds_what_is_queued(chat):
    await chat.load()
    for text in ("one", "two", "three"):
        await chat.ask(text)
    await chat.controller.handle(Crashed(1, ()))
    await chat.load()
    assert (chat.turns, chat.view.prompt, chat.view.queue) == ([], "one", (2, True))
    await chat.controller.handle(Crashed(1, ()))
    assert (chat.phase, chat.view.queue) == (Phase.DOWN, (2, True))
    await chat.controller.release_queue()
    await chat.load()
    assert chat.turns == ["two"]


async def test_an_engine_that_becomes_ready_while_a_question_is_mounted_answers_it(chat):
    chat.view.while_mounting = chat.load
    await chat.ask("one")
    assert [type(command) for command in chat.client.sent] == [Chat]
    assert not chat.controller.answers.queue


async def test_an_engine_that_ends_while_a_question_is_mounted_gives_it_back(chat):
    await chat.controller.handle(Crashed(1, ()))

    async def crash():
        await chat.controller.handle(Crashed(1, ()))

    chat.view.while_mounting = crash
    await chat.ask("one")
    assert chat.phase is Phase.DOWN
    assert chat.view.prompt == "one"


async def test_a_command_typed_behind_questions_waits_for_its_turn_and_a_key_acts_at_once(running):
    async with running() as (app, _pilot, until):
        typed(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        typed(app, "two")
        await until(lambda: len(app.controller.answers.queue) == 1)
        for line in ("/mode sync", "/system Be brief.", "three"):
            waiting = len(app.controller.answers.queue)
            typed(app, line)
            await until(lambda waiting=waiting: len(app.controller.answers.queue) == waiting + 1)
        assert (app.controller.state.mode, app.controller.state.conversation.system) == ("full", None)
        press(app, "f6")
        await until(lambda: app.controller.state.mode == "freeze")
        app.controller.client.send(Stop())
        await until(lambda: len(app.controller.state.conversation.stats) == 3)
        modes = [message.receipt for message in app.controller.state.conversation.path if message.role == "assistant"]
        seen = [("freeze" in receipt, "sync" in receipt) for receipt in modes]
        assert seen == [(True, False), (True, False), (False, True)]
        assert app.controller.state.conversation.system == "Be brief."
