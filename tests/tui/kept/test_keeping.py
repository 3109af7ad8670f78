"""Going from one conversation to another: what is saved, taken up and forgotten."""

from __future__ import annotations

import asyncio

import pytest
from support.patience import PATIENCE_S

from kvchat.errors import UsageError
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import (
    Finished,
    Forget,
    Resumed,
    Stop,
    Text,
)
from kvchat.tui.kept import keeping
from kvchat.tui.state import Phase

DONE = Finished("eos", "hi", Stats(generated_tokens=1))


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
