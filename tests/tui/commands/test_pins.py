"""``/pin``: chosen messages, kept with the conversation and handed to the engine at once and with every question."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.app_driver import finished, focus, typed
from support.keeping import keep

from kvchat.conversations.store import ConversationStore
from kvchat.errors import TooMuchPinnedError, UsageError
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Chat, Failed, Finished, Resume, Switch
from kvchat.tui.commands.chat import pin
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.transcript import Transcript


@pytest.fixture
async def talk(chat):
    """Two questions, answered."""
    await chat.load()
    for question, answer in (("one", "1"), ("two", "2")):
        await chat.ask(question)
        await chat.controller.handle(Finished("eos", answer, Stats(generated_tokens=1)))
    return chat


def pinned(command):
    return [turn.content for turn in command.turns if turn.pinned]


async def test_what_is_pinned_goes_to_the_engine_at_once_and_with_every_question(talk):
    chat, path = talk.controller, talk.controller.state.conversation.path
    talk.view.chosen = path[1].id
    await pin(chat, "")
    talk.view.chosen = None
    assert isinstance(talk.client.sent[-1], Resume)
    await pin(chat, "")
    await pin(chat, "1")
    assert pinned(talk.client.sent[-1]) == ["one", "1", "two"]
    assert talk.view.footers[path[1].id].endswith("◆ pinned")
    await pin(chat, "1")
    assert talk.view.footers[path[0].id] == ""
    await talk.ask("three")
    assert isinstance(talk.client.sent[-1], Chat)
    assert pinned(talk.client.sent[-1]) == ["1", "two"]


async def test_all_are_unpinned_at_once_and_the_system_prompt_is_a_parameter(talk):
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    await pin(talk.controller, "none")
    assert pinned(talk.client.sent[-1]) == []
    await pin(talk.controller, "none")
    assert len(talk.view.toasts) == 4
    assert talk.view.toasts[-2].startswith("2 ")
    talk.controller.set_system("be brief")
    await pin(talk.controller, "system")
    assert talk.client.sent[-1] == Switch("", {"pin_system": True})


@pytest.fixture
async def long_talk(talk):
    """Three questions, the third of which is longer than may be pinned."""
    await talk.ask("three")
    stats = Stats(prompt_tokens=9_000, generated_tokens=1, total_tokens=9_001)
    await talk.controller.handle(Finished("eos", "3", stats))
    return talk


async def test_more_than_half_of_the_context_is_refused_and_not_marked(long_talk):
    chat, path = long_talk.controller, long_talk.controller.state.conversation.path
    chat.state.info = replace(chat.state.info, context=16_384)
    sent = len(long_talk.client.sent)
    with pytest.raises(UsageError, match=r"9,000.*16,384.*8,192"):
        await pin(chat, "3")
    assert not chat.state.conversation.path[4].pinned
    assert path[4].id not in long_talk.view.footers
    assert len(long_talk.client.sent) == sent
    assert not long_talk.view.toasts
    await pin(chat, "1")
    with pytest.raises(UsageError):
        await pin(chat, "3")


async def test_the_first_question_is_left_to_the_engine_where_its_length_is_known_with_the_system_prompts_only(chat):
    await chat.load()
    chat.controller.state.info = replace(chat.controller.state.info, context=16_384)
    chat.controller.set_system("a long text")
    await chat.ask("one")
    stats = Stats(prompt_tokens=9_000, generated_tokens=1, total_tokens=9_001)
    await chat.controller.handle(Finished("eos", "1", stats))
    await pin(chat.controller, "1")
    await pin(chat.controller, "1")
    chat.controller.state.params = {"pin_system": True}
    with pytest.raises(TooMuchPinnedError):
        await pin(chat.controller, "1")


async def test_what_the_engine_refuses_to_pin_is_unmarked_so_that_the_chat_goes_on(talk):
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    refused = Failed("Too much is pinned.", "", "", TooMuchPinnedError.__name__, False)
    await talk.controller.handle(refused)
    assert pinned(talk.client.sent[-1]) == ["one"]
    assert "unpinned" in talk.view.toasts[-1]
    await talk.controller.handle(refused)  # of a question that was asked before that
    assert [message.pinned for message in talk.controller.state.conversation.path] == [True, False, False, False]


async def test_what_was_pinned_on_another_branch_stays_so_when_the_engine_refuses(talk):
    chat = talk.controller
    await pin(chat, "2")
    before = chat.state.conversation.path[2]
    chat.branches.edit()
    await talk.ask("a longer two")
    await chat.handle(Failed("Too much is pinned.", "", "", TooMuchPinnedError.__name__, False))
    assert chat.state.conversation.messages[before.id].pinned


@pytest.mark.parametrize("argument", ["0", "3", "-1", "cat"])
async def test_a_question_that_is_not_there_is_refused(talk, argument):
    with pytest.raises(UsageError, match="2 are asked"):
        await pin(talk.controller, argument)


async def test_pins_are_kept_with_the_conversation(talk, tmp_path):
    conversation = talk.controller.state.conversation
    await pin(talk.controller, "1")
    store = ConversationStore(tmp_path / "kept.db")
    keep(store, conversation)
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    keep(store, conversation)
    assert [message.pinned for message in store.load(conversation.id).path] == [False, False, True, False]
    assert [turn.pinned for turn in conversation.fork(conversation.path[2].id).turns] == [False, False, True]
    store.close()


async def test_a_pinned_message_is_marked_where_it_stands(running):
    async with running() as (app, pilot, until):
        typed(app, "hello there")
        await until(lambda: finished(app))
        transcript = app.chat.query_one(Transcript)
        await focus(transcript)
        await pilot.press("up", "up")
        await until(lambda: transcript.chosen == app.chat.query_one(Question).message)
        await pilot.press("p")
        await until(lambda: "◆ pinned" in str(app.chat.query_one(Question).content))
        assert transcript.chosen
        await pilot.press("p")
        await until(lambda: "◆ pinned" not in str(app.chat.query_one(Question).content))
