"""``/pin``: chosen messages, kept with the conversation and handed to the engine at once and with every question."""

from __future__ import annotations

import pytest
from support.app_driver import finished, focus, typed

from kvchat.conversations.store import ConversationStore
from kvchat.errors import UsageError
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Chat, Finished, Resume, Switch
from kvchat.tui.commands.pins import pin
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
    assert talk.view.toasts[-2:] == ["2 unpinned.", "No message is pinned."]
    talk.controller.set_system("be brief")
    await pin(talk.controller, "system")
    assert talk.client.sent[-1] == Switch("", {"pin_system": True})


@pytest.mark.parametrize("argument", ["0", "3", "-1", "cat"])
async def test_a_question_that_is_not_there_is_refused(talk, argument):
    with pytest.raises(UsageError, match="2 are asked"):
        await pin(talk.controller, argument)


async def test_pins_are_kept_with_the_conversation(talk, tmp_path):
    conversation = talk.controller.state.conversation
    await pin(talk.controller, "1")
    store = ConversationStore(tmp_path / "kept.db")
    store.save(conversation.take_changes())
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    store.save(conversation.take_changes())
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
