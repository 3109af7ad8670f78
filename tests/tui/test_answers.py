"""The answer in progress: kept when there is text, given back when there is none."""

from __future__ import annotations

import pytest

from kvchat.conversations.conversation import ModeChange
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Chat, Finished, Prefilled, Started, Stop, Switched, Text, Withdrawn
from kvchat.tui.state import Phase


@pytest.fixture
async def asked(chat):
    await chat.load()
    await chat.ask("one")
    return chat


async def test_progress_is_shown_before_the_first_word(asked):
    await asked.controller.handle(Started(2000, 500))
    assert asked.view.answers[0].waiting == "processing 1,500 new tokens (500 cached) …"
    await asked.controller.handle(Prefilled(1000, 1500))
    assert asked.view.answers[0].waiting.startswith("processing 1,000 of 1,500 tokens")


async def test_text_is_fed_and_completed_with_a_receipt(asked):
    await asked.controller.handle(Text("he", 1))
    assert asked.phase is Phase.ANSWERING
    await asked.controller.handle(Text("llo", 1))
    await asked.controller.handle(Finished("eos", "hello", Stats(generated_tokens=2)))
    answer = asked.view.answers[0]
    assert (answer.text, answer.receipt, answer.finished, answer.stopped) == ("hello", "2 tok · full", True, False)
    assert asked.turns == ["one", "hello"]


async def test_a_stopped_answer_keeps_its_text(asked):
    await asked.controller.handle(Text("he", 1))
    await asked.controller.handle(Finished("stopped", "he", Stats(generated_tokens=1)))
    assert asked.turns == ["one", "he"]
    assert asked.view.answers[0].stopped


async def test_an_answer_stopped_before_the_first_word_gives_the_question_back(asked):
    await asked.controller.handle(Finished("stopped", "", Stats()))
    assert (asked.view.prompt, asked.turns) == ("one", [])
    assert asked.view.answers[0].removed
    assert asked.view.questions[0].removed
    assert asked.controller.state.conversation.stats == []


async def test_an_abandoned_answer_keeps_its_text(asked):
    await asked.controller.handle(Text("he", 1))
    await asked.controller.answers.abandon()
    assert asked.view.answers[0].receipt == "cut off"
    assert asked.turns == ["one", "he"]


async def test_withdrawn_text_is_struck(asked):
    await asked.controller.handle(Text("good bad", 2))
    await asked.controller.handle(Withdrawn(4, 1))
    assert asked.view.answers[0].text == "good"
    assert asked.view.notes == ["withdrawn: bad"]


async def test_a_switch_counts_the_tokens_after_it_until_the_next_one(asked):
    await asked.controller.handle(Switched("full", "streaming", {}, 10, 0, 0.0))
    await asked.controller.handle(Text("a b", 2))
    await asked.controller.handle(Switched("streaming", "full", {}, 12, 0, 0.0))
    await asked.controller.handle(Text("c", 1))
    first, second = asked.view.switches
    assert (first.tokens, first.closed, second.tokens) == (2, 1, 1)


async def test_switches_without_a_token_between_them_are_one(asked):
    answers = asked.controller.answers
    for before, mode, moved, speed in (("full", "freeze", 5, 41.0), ("freeze", "streaming", 7, None)):
        await answers.add_switch(Switched(before, mode, {}, 10, moved, 0.0), speed)
    assert [switch.removed for switch in asked.view.switches] == [True, False]
    merged = asked.view.switches[-1]
    assert (merged.switched.before, merged.switched.mode, merged.switched.moved_bytes) == ("full", "streaming", 12)
    assert merged.speed == 41.0
    await answers.add_switch(Switched("streaming", "full", {}, 10, 0, 0.0), None)
    assert all(switch.removed for switch in asked.view.switches)
    assert len(asked.view.switches) == 2
    assert [back.mode for back in asked.view.ways_back] == ["full"], "where lines stay, the way back is told"


async def test_of_two_budgets_without_a_token_between_them_the_second_is_shown(asked):
    for budget in (256, 128):
        await asked.controller.handle(Switched("sync", "sync", {"budget": budget}, 10, 0, 0.0))
    assert [switch.removed for switch in asked.view.switches] == [True, False]
    assert asked.view.switches[-1].switched.params == {"budget": 128}


async def switch(asked, before, mode, total):
    await asked.controller.handle(Switched(before, mode, {}, total, 0, 0.0))


async def test_switches_in_the_text_are_kept_with_the_answer_as_it_grows(asked):
    conversation = asked.controller.state.conversation
    await switch(asked, "full", "streaming", 10)  # before the first word
    await asked.controller.handle(Text("one two", 2))
    await switch(asked, "streaming", "full", 12)
    await asked.controller.handle(Text(" three", 1))
    asked.controller.answers.checkpoint()
    kept = (ModeChange(0, "full -> streaming", 10, "streaming"), ModeChange(7, "streaming -> full", 12, "full"))
    assert conversation.leaf.switch_lines == kept
    await switch(asked, "full", "freeze", 13)
    await switch(asked, "freeze", "sync", 13)  # without a token between them
    await asked.controller.handle(Finished("stopped", "one two three", Stats()))
    kept = (*kept, ModeChange(13, "full -> sync", 13, "sync"))
    assert conversation.leaf.switch_lines == kept

    await asked.controller.branches.resume()
    await asked.controller.handle(Text(" four", 1))
    await switch(asked, "sync", "full", 20)
    await asked.controller.answers.abandon()
    await asked.controller.answers.ready()
    kept = (*kept, ModeChange(18, "sync -> full", 20, "full"))
    assert conversation.leaf.switch_lines == kept

    await switch(asked, "full", "sync", 20)  # after the answer: what is kept stays
    assert not asked.view.switches[-2].removed
    assert conversation.leaf.switch_lines == (*kept, ModeChange(18, "full -> sync", 20, "sync"))
    await switch(asked, "sync", "full", 20)  # and back
    assert conversation.leaf.switch_lines == kept
    await switch(asked, "full", "full", 20)  # another parameter
    assert asked.controller.answers.switch_positions == (10, 12, 13, 20)
    await asked.controller.branches.regenerate()
    await asked.controller.handle(Text("other", 1))
    await asked.controller.handle(Finished("eos", "other", Stats()))
    assert conversation.leaf.switch_lines == ()
    assert asked.controller.answers.switch_positions == (), "they were on another branch"
    await asked.controller.branches.select_sibling(1)
    assert asked.controller.answers.switch_positions == (10, 12, 13, 20)


async def test_a_switch_in_an_answer_that_is_left_is_kept(asked):
    left = asked.controller.state.conversation
    await asked.controller.handle(Text("one", 1))
    await switch(asked, "full", "sync", 12)
    await asked.controller.new()
    assert left.leaf.switch_lines == (ModeChange(3, "full -> sync", 12, "sync"),)
    assert asked.controller.answers.switch_positions == ()


async def test_a_stop_while_the_question_is_saved_stops_the_answer_as_soon_as_it_is_asked_for(chat):
    await chat.load()

    async def stop():
        chat.controller.stop()

    chat.controller.answers.save = stop
    await chat.ask("one")
    assert [type(command) for command in chat.client.sent] == [Chat, Stop]


async def test_a_stop_while_the_question_is_mounted_stops_the_answer_as_soon_as_it_is_asked_for(chat):
    await chat.load()

    async def stop():
        chat.controller.stop()

    chat.view.while_mounting = stop
    await chat.ask("one")
    assert [type(command) for command in chat.client.sent] == [Chat, Stop]


@pytest.mark.parametrize("when", ["saved", "mounted"])
async def test_another_conversation_begun_before_the_answer_is_asked_for_leaves_the_question_unasked(chat, when):
    await chat.load()
    first = chat.controller.state.conversation
    add = chat.view.add_answer

    async def leave():
        if chat.controller.state.conversation is first and (when == "saved" or chat.controller.answers.answer is None):
            await chat.controller.new()

    async def mount():
        await leave()
        return await add()

    if when == "saved":
        chat.controller.answers.save = leave
    else:
        chat.view.add_answer = mount
    await chat.ask("one")
    assert not [command for command in chat.client.sent if isinstance(command, Chat)]
    assert (chat.phase, chat.turns, [turn.content for turn in first.turns]) == (Phase.READY, [], ["one"])
    assert all(answer.removed for answer in chat.view.answers)
    await chat.ask("two")
    assert chat.client.sent[-1].turns[-1].content == "two"
