"""Changing the conversation: what is saved, resumed and forgotten."""

import asyncio
from dataclasses import replace

import pytest
from support.message import lacks
from support.patience import PATIENCE_S

from kvchat.errors import UsageError
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import Finished, Forget, Resumed, Stop, Switch, Switched, Text
from kvchat.tui import controller
from kvchat.tui.state import Phase

DONE = Finished("eos", "hi", Stats(generated_tokens=1))


async def test_a_new_conversation_stops_the_running_answer(chat):
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


async def test_answers_are_saved_as_they_stream(chat, monkeypatch):
    monkeypatch.setattr(controller, "CHECKPOINT_S", 0.01)
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


async def test_a_conversation_opens_at_the_found_message(chat):
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


async def test_new_conversations_keep_the_system_prompt(chat):
    await chat.load()
    chat.controller.set_system("be brief")
    await chat.controller.new()
    assert chat.controller.state.conversation.system == "be brief"


async def test_opening_a_conversation_restores_its_stored_kv(chat, tmp_path):
    await chat.controller.archive.open()
    await chat.load()
    await chat.controller.ask("hello")
    first = chat.controller.state.conversation
    await chat.controller.handle(Finished("eos", "Hello!", Stats()))
    await chat.controller.new()
    assert chat.client.sent[-1] != first.to_resume()  # the new one is still empty
    await chat.controller.open(first.id)
    assert chat.client.sent[-1] == first.to_resume()
    await chat.controller.handle(Resumed("another", 9, 0.1, "disk"))
    assert not chat.controller.state.is_stored
    await chat.controller.handle(Resumed(first.id, 30_112, 0.0, ""))
    assert (chat.controller.state.is_stored, chat.view.notes) == (True, [])
    await chat.controller.handle(Resumed(first.id, 30_112, 0.4, "memory"))
    assert not lacks(chat.view.notes[-1], "30,112 tokens", "memory", "400 ms")
    await chat.controller.delete(first.id, first.title)
    assert Forget(first.id) in chat.client.sent


async def test_figures_stay_only_within_a_conversation(chat):
    await chat.controller.archive.open()
    await chat.load()
    await chat.ask("hello")
    await chat.controller.handle(DONE)
    current = chat.controller.state
    badges = ("low coverage: 80 %", "no CUDA graph: hybrid")
    stored = Snapshot("streaming", {}, 5.0, 9, 100, 0, 0, coverage=0.8, badges=badges)
    await chat.controller.handle(stored)
    await chat.controller.open(current.conversation.id)
    assert chat.view.snapshots[-1] == current.snapshot == stored
    await chat.controller.fork()
    await chat.controller.handle(replace(stored, total=8))
    assert current.snapshot == replace(stored, total=8)
    await chat.controller.new()
    assert (current.snapshot.total, current.snapshot.coverage, current.snapshot.badges) == (0, None, badges[1:])


SPECULATIVE = Switched("full", "speculative", {"budget": 128}, 0, 0, 0.0, given={"speculative": {"budget": 128}})


def switches(chat):
    return [(one.mode, one.params) for one in chat.client.sent if isinstance(one, Switch)]


async def in_speculative(chat):
    """The id of a saved conversation in speculative mode with a budget of 128."""
    await chat.controller.open_archive()
    await chat.load()
    await chat.controller.handle(SPECULATIVE)
    await chat.ask("one")
    await chat.controller.handle(DONE)
    return chat.controller.state.conversation.id


async def test_reopening_a_conversation_restores_its_mode(chat):
    saved_id = await in_speculative(chat)
    await chat.controller.new()
    given = {"speculative": {"budget": 512, "tau": 0.5}}
    await chat.controller.handle(Switched("speculative", "full", {}, 0, 0, 0.0, given=given))
    await chat.ask("two")
    await chat.controller.handle(DONE)
    chat.client.sent.clear()
    await chat.controller.open(saved_id)
    assert switches(chat) == [("speculative", {"budget": 128, "tau": None})]
    assert not chat.view.notes
    lines = len(chat.view.switches)
    await chat.controller.handle(SPECULATIVE)
    assert "speculative" in chat.view.notes[-1]
    assert "128" in chat.view.notes[-1]
    assert len(chat.view.switches) == lines, "it is reported once"
    await chat.controller.open_last()
    assert switches(chat)[1:] == [("full", {})]
    await chat.controller.open(saved_id)
    assert (await chat.controller.archive.load(saved_id)).mode == "speculative", "the pending switch is the other's"


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        ({}, [("speculative", {"budget": 128})]),
        ({"asked_mode": "sync"}, []),
        ({"asked_mode": "speculative"}, [("speculative", {"budget": 128})]),
        ({"asked_params": {"speculative": {"budget": 256}}}, [("speculative", {"budget": 256})]),
    ],
)
async def test_the_latest_conversation_keeps_its_mode_unless_overridden(config, chat_of, tmp_path, flags, sent):
    config = replace(config, database=tmp_path / "chats.db")
    first = chat_of(config)
    await in_speculative(first)
    await first.controller.close()
    second = chat_of(replace(config, resume=True, **flags))
    await second.controller.open_archive(resume=True)
    assert switches(second) == [], "no model is ready"
    await second.controller.start()
    await second.load()
    assert switches(second) == sent
    await second.controller.close()


FULL_BY_AUTO = "auto: full, 12 ms a token"
AUTO_PARAMS = {"auto": {"tokens_per_s": 5}, "speculative": {"window": 64, "budget": 512}}


async def in_auto(chat):
    """The id of a saved conversation in auto, with a window for one of the modes that auto enters."""
    await chat.controller.open_archive()
    await chat.load()
    await chat.controller.handle(Switched("full", "full", {}, 0, 0, 0.0, given=AUTO_PARAMS, auto=FULL_BY_AUTO))
    await chat.ask("one")
    await chat.controller.handle(DONE)
    return chat.controller.state.conversation.id


async def test_reopening_restores_the_parameters_of_auto(chat):
    saved_id = await in_auto(chat)
    assert chat.controller.state.conversation.params == {
        "tokens_per_s": 5,
        "budget": 512,
        "speculative": {"window": 64},
    }
    await chat.controller.new()
    await chat.controller.handle(Switched("full", "full", {}, 0, 0, 0.0, given={"sync": {"mem": 0.7}}))
    await chat.ask("two")
    await chat.controller.handle(DONE)
    chat.client.sent.clear()
    await chat.controller.open(saved_id)
    expected = {"tokens_per_s": 5, "budget": 512, "sync": {"mem": None}, "speculative": {"window": 64}}
    assert switches(chat) == [("auto", expected)]
    given = {**AUTO_PARAMS, "sync": {"mem": None}}
    await chat.controller.handle(Switched("full", "full", {}, 0, 0, 0.0, given=given, auto=FULL_BY_AUTO))
    assert not lacks(" ".join(chat.view.notes[-2:]), "auto mode", "tokens_per_s 5", "speculative window 64")


async def test_command_line_parameters_override_those_of_auto(config, chat_of, tmp_path):
    config = replace(config, database=tmp_path / "chats.db")
    first = chat_of(config)
    await in_auto(first)
    await first.controller.close()
    requested = {"speculative": {"window": 96}, "sync": {"mem": 0.7}, "streaming": {"sigma": 8}}
    second = chat_of(replace(config, resume=True, asked_params=requested))
    await second.controller.open_archive(resume=True)
    await second.controller.start()
    await second.load()
    entered = {"speculative": {"window": 96}, "sync": {"mem": 0.7}}
    assert switches(second) == [("auto", {"tokens_per_s": 5, "budget": 512, **entered})]
    await second.controller.close()


async def test_a_removed_mode_is_reported_on_reopening(chat):
    saved_id = await in_speculative(chat)
    chat.controller.state.conversation.mode = "strided"
    await chat.controller.new()
    chat.client.sent.clear()
    await chat.controller.open(saved_id)
    assert switches(chat) == []
    assert "strided" in chat.view.notes[-1]


async def test_piped_questions_are_saved_only_in_saved_conversations(config, chat_of, tmp_path):
    config = replace(config, database=tmp_path / "chats.db")
    first = chat_of(config)
    saved_id = await in_speculative(first)
    await first.controller.close()
    piped = chat_of(replace(config, keeps_new=False))
    await piped.controller.open_archive()
    await piped.load()
    for begin in (piped.controller.new, piped.controller.new, piped.controller.fork):
        await begin()
        await piped.ask("two")
        assert piped.client.sent[-1].conversation == ""
        await piped.controller.handle(DONE)
    assert [one.id for one in await piped.controller.archive.search("")] == [saved_id]
    await piped.controller.open(saved_id)
    await piped.ask("three")
    assert piped.client.sent[-1].conversation == saved_id
    await piped.controller.handle(DONE)
    assert len((await piped.controller.archive.load(saved_id)).messages) == 4
    await piped.controller.close()
