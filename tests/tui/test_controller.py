"""What the user asks for, without a screen: commands to the engine, changes of the state, refusals."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from support.patience import PATIENCE_S

from kvchat.config.modes import mode_names
from kvchat.errors import EngineError, UsageError
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import (
    Chat,
    Failed,
    Finished,
    Forget,
    Load,
    Peek,
    Rebuild,
    Rebuilt,
    Resumed,
    Stop,
    Switch,
    Switched,
    Text,
    Turn,
)
from kvchat.tui.client import Crashed
from kvchat.tui.controller import PEEK_TOKENS
from kvchat.tui.kept import keeping
from kvchat.tui.state import Phase

DONE = Finished("eos", "hi", Stats(generated_tokens=1))


async def test_starting_loads_the_model(chat):
    await chat.controller.start()
    assert chat.client.sent == [chat.controller.models.in_use]
    assert chat.phase is Phase.LOADING
    await chat.load()
    assert chat.phase is Phase.READY


async def test_an_engine_that_cannot_be_started_gives_the_question_back(chat):
    chat.client.start_error = EngineError("The engine cannot be started.")
    await chat.ask("hello")
    await chat.controller.start()
    assert chat.view.errors == [chat.client.start_error]
    assert chat.phase is Phase.DOWN
    assert (chat.view.prompt, chat.view.questions[0].removed) == ("hello", True)
    chat.client.start_error = None
    await chat.ask("hello")
    assert chat.client.starts == 2


async def test_a_lost_log_is_reported_once(chat):
    chat.client.log_problem = "The log cannot be written."
    await chat.controller.start()
    await chat.controller.restart()
    assert chat.view.toasts == ["The log cannot be written. The engine's messages are dropped."]


async def test_unloading_ends_the_engine_and_the_next_question_starts_one(chat):
    await chat.load()
    await chat.ask("one")
    with pytest.raises(UsageError, match="busy"):
        await chat.controller.unload()
    await chat.controller.handle(DONE)
    await chat.controller.unload()
    assert (chat.client.is_closed, chat.phase) == (True, Phase.DOWN)
    assert chat.view.notes[-1].startswith("The model is unloaded")
    await chat.ask("two")
    await chat.load()
    assert chat.turns == ["one", "hi", "two"]


async def test_a_question_is_sent_with_the_whole_conversation(chat):
    await chat.load()
    chat.controller.set_system("be brief")
    chat.controller.set_sampling("temperature", "0.2")
    await chat.ask("one")
    await chat.controller.handle(DONE)
    await chat.ask("two")
    turns = (Turn("system", "be brief"), Turn("user", "one"), Turn("assistant", "hi"), Turn("user", "two"))
    assert chat.client.sent[-1] == Chat(turns, chat.controller.state.sampling, chat.controller.state.conversation.id)
    assert chat.phase is Phase.PREFILL


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


async def test_stopping_is_sent_only_during_an_answer(chat):
    await chat.load()
    chat.controller.stop()
    assert not chat.client.sent
    await chat.ask("one")
    chat.controller.stop()
    assert chat.client.sent[-1] == Stop()


async def test_rebuilding_needs_an_engine_that_is_ready(chat):
    with pytest.raises(UsageError, match="busy"):
        chat.controller.rebuild()
    await chat.load()
    chat.controller.rebuild()
    assert chat.client.sent == [Rebuild()]
    assert chat.phase is Phase.PREFILL


async def test_a_new_conversation_stops_and_forgets(chat):
    await chat.load()
    await chat.ask("one")
    await chat.ask("queued")
    await chat.controller.new()
    assert chat.client.sent[-1] == Stop()
    assert (chat.turns, chat.view.shown, chat.view.prompt) == ([], [([], [], None)], "queued")
    await chat.controller.handle(Text("late", 1))
    await chat.controller.handle(DONE)
    assert (chat.turns, chat.controller.state.conversation.stats, chat.phase) == ([], [], Phase.READY)
    assert chat.view.answers[0].text == ""


async def test_switching_is_checked_before_it_is_sent(chat):
    with pytest.raises(UsageError, match="not loaded"):
        chat.controller.switch("streaming")
    await chat.load()
    with pytest.raises(UsageError, match="no KV mode"):
        chat.controller.switch("straeming")
    with pytest.raises(UsageError, match="no parameter"):
        chat.controller.switch("streaming", {"tau": 0.5})
    assert not chat.client.sent
    chat.controller.switch("streaming", {"budget": 128})
    assert chat.client.sent == [Switch("streaming", {"budget": 128})]


async def test_switching_by_steps_counts_from_the_mode_last_asked_for(chat):
    await chat.load()
    names = mode_names()
    for _ in range(3):
        chat.controller.switch_by(1)
    chat.controller.switch_by(-1)
    assert [command.mode for command in chat.client.sent] == [names[1], names[2], names[3], names[2]]
    chat.controller.state.enter_mode("full", {})
    chat.controller.switch_by(-1)
    assert chat.client.sent[-1].mode == names[-1]


async def test_a_parameter_kept_for_later_goes_with_the_first_mode_that_has_it(chat):
    await chat.load()
    chat.controller.set_later("window", 96)
    with pytest.raises(UsageError):
        chat.controller.set_later("window", -1)
    chat.controller.set_later("K", 96)
    chat.controller.switch("freeze")
    chat.controller.switch("streaming")
    chat.controller.switch("speculative")
    assert [command.params for command in chat.client.sent] == [{"K": 96}, {"window": 96}, {}]


async def test_a_restart_keeps_mode_values_and_conversation(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(DONE)
    given = {"speculative": {"tau": 0.9, "budget": 128}, "streaming": {"sigma": 8}}
    for mode, params in given.items():
        chat.controller.switch(mode, params)
        await chat.controller.handle(Switched("full", mode, params, 10, 0, 0.0, given=given))
    await chat.controller.restart()
    load = chat.client.sent[-1]
    assert isinstance(load, Load)
    assert (load.mode, load.given) == ("streaming", given)
    assert chat.turns == ["one", "hi"]
    assert chat.view.snapshots == [None]


async def test_peeking_is_limited_and_needs_a_model(chat):
    chat.controller.peek(0, 32)
    await chat.load()
    chat.controller.peek(64, 64 + 10 * PEEK_TOKENS)
    assert chat.client.sent == [Peek(64, 64 + PEEK_TOKENS)]


async def test_a_command_too_long_for_the_protocol_is_shown(chat):
    await chat.load()
    chat.client.send_error = UsageError("The conversation is too long to send.")
    await chat.ask("one")
    chat.controller.rebuild()
    assert chat.view.errors == [chat.client.send_error] * 2
    assert (chat.view.prompt, chat.turns) == ("one", [])


async def test_what_is_said_is_saved_while_it_is_said(chat, monkeypatch):
    monkeypatch.setattr(keeping, "CHECKPOINT_S", 0.01)
    assert await chat.controller.open_archive(resume=True) is None
    assert "no earlier conversation" in chat.view.toasts[0]
    await chat.load()
    await chat.ask("one")
    assert (await chat.controller.archive.latest()).title == "one"
    await chat.controller.handle(Text("par", 1))
    saving = asyncio.create_task(chat.controller.keep())
    async with asyncio.timeout(PATIENCE_S):
        while (await chat.controller.archive.load(chat.controller.state.conversation.id)).last_text() != "par":
            await asyncio.sleep(0.01)
    saving.cancel()
    await chat.controller.close()


async def test_another_conversation_is_opened_at_the_message_found(chat):
    await chat.controller.open_archive()
    await chat.load()
    with pytest.raises(UsageError, match="no earlier"):
        await chat.controller.open_last()
    await chat.ask("one")
    await chat.controller.handle(DONE)
    first = chat.controller.state.conversation
    await chat.controller.branches.regenerate()
    await chat.controller.handle(Finished("eos", "hello", Stats(generated_tokens=1)))
    await chat.controller.new()
    assert chat.turns == []
    await chat.controller.open_last()
    assert chat.turns == ["one", "hello"]
    assert chat.view.shown[-1][0] == ["one", "hello"]
    hi = next(message for message in first.messages.values() if message.text == "hi")
    await chat.controller.open(first.id, hi.id)
    assert chat.turns == ["one", "hi"]
    await chat.controller.fork()
    assert chat.controller.state.conversation.id != first.id
    await chat.controller.close()


async def test_panels_show_nothing_of_the_conversation_before(chat):
    snapshot = Snapshot("full", {}, 9.0, 9, 100, 1, 1, ribbon="D", attended="9")
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(DONE)
    await chat.controller.handle(snapshot)
    assert chat.view.snapshots[-1] == snapshot
    await chat.controller.new()
    await chat.controller.handle(snapshot)
    shown = chat.view.snapshots[-1]
    assert (shown.total, shown.ribbon, shown.kv_host_bytes) == (0, "", 1)


async def test_the_system_prompt_given_by_hand_goes_into_new_conversations(chat):
    await chat.load()
    chat.controller.set_system("be brief")
    await chat.controller.new()
    assert chat.controller.state.conversation.system == "be brief"


async def test_going_to_a_conversation_takes_up_what_the_engine_keeps_of_it(chat, tmp_path):
    await chat.controller.archive.open()
    await chat.load()
    await chat.controller.ask("hello")
    first = chat.controller.state.conversation
    await chat.controller.handle(Finished("eos", "Hello!", Stats()))
    await chat.controller.new()
    assert chat.client.sent[-1] != first.to_resume()  # nothing was said in the new one yet
    await chat.controller.open(first.id)
    assert chat.client.sent[-1] == first.to_resume()
    await chat.controller.handle(Resumed("another", 9, 0.1, "disk"))
    assert not chat.controller.state.is_stored
    await chat.controller.handle(Resumed(first.id, 30_112, 0.4, "memory"))
    assert chat.controller.state.is_stored
    assert chat.view.notes[-1] == "30,112 tokens came back from memory in 400 ms."
    await chat.controller.delete(first.id, first.title)
    assert Forget(first.id) in chat.client.sent
