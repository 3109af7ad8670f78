"""The answer in progress: its text is kept; without text the question returns to the prompt."""

from functools import partial

import pytest

from kvchat.conversations.conversation import ModeChange
from kvchat.errors import UsageError
from kvchat.protocol.client import Crashed
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import (
    Chat,
    Failed,
    Finished,
    Prefilled,
    Rebuild,
    Rebuilt,
    Started,
    Stop,
    Switch,
    Switched,
    Text,
    Withdrawn,
)
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


async def test_streamed_text_ends_with_a_receipt(asked):
    await asked.controller.handle(Text("he", 1))
    assert asked.phase is Phase.ANSWERING
    await asked.controller.handle(Text("llo", 1))
    await asked.controller.handle(Finished("eos", "hello", Stats(generated_tokens=2)))
    answer = asked.view.answers[0]
    assert (answer.text, answer.receipt, answer.finished, answer.stopped) == ("hello", "2 tok · full", True, False)
    assert asked.turns == ["one", "hello"]


async def test_the_current_conversation_can_be_reopened_during_an_answer(asked):
    await asked.controller.archive.open()
    current = asked.controller.state.conversation
    question = current.leaf
    current.go_to(None)
    other = current.ask("other")
    current.go_to(question.id)
    await asked.controller.handle(Text("he", 1))
    await asked.controller.open(current.id)
    with pytest.raises(UsageError):
        await asked.controller.open(current.id, other.id)
    await asked.controller.handle(Text("llo", 1))
    await asked.controller.handle(Finished("eos", "hello", Stats(generated_tokens=2)))
    assert asked.turns == ["one", "hello"]


async def test_a_stopped_answer_keeps_its_text(asked):
    await asked.controller.handle(Text("he", 1))
    await asked.controller.handle(Finished("stopped", "he", Stats(generated_tokens=1)))
    assert asked.turns == ["one", "he"]
    assert asked.view.answers[0].stopped


async def test_stopping_before_the_first_word_returns_the_question(asked):
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


async def test_withdrawn_text_is_removed_and_noted(asked):
    await asked.controller.handle(Text("good bad", 2))
    await asked.controller.handle(Withdrawn(4, 1))
    assert asked.view.answers[0].text == "good"
    assert asked.view.notes == ["withdrawn by recovery: bad"]


async def test_a_switch_counts_tokens_until_the_next_switch(asked):
    await asked.controller.handle(Switched("full", "streaming", {}, 10, 0, 0.0))
    await asked.controller.handle(Text("a b", 2))
    await asked.controller.handle(Switched("streaming", "full", {}, 12, 0, 0.0))
    await asked.controller.handle(Text("c", 1))
    first, second = asked.view.switches
    assert (first.tokens, first.closed, second.tokens) == (2, 1, 1)


async def test_switches_without_tokens_between_are_merged(asked):
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
    assert [back.mode for back in asked.view.ways_back] == ["full"], "line mode prints the switch back"


async def test_only_the_last_of_consecutive_budgets_is_shown(asked):
    for budget in (256, 128):
        await asked.controller.handle(Switched("sync", "sync", {"budget": budget}, 10, 0, 0.0))
    assert [switch.removed for switch in asked.view.switches] == [True, False]
    assert asked.view.switches[-1].switched.params == {"budget": 128}


async def switch(asked, before, mode, total):
    await asked.controller.handle(Switched(before, mode, {}, total, 0, 0.0))


async def test_switch_lines_are_saved_with_a_growing_answer(asked):
    conversation = asked.controller.state.conversation
    await switch(asked, "full", "streaming", 10)  # before the first word
    await asked.controller.handle(Text("one two", 2))
    await switch(asked, "streaming", "full", 12)
    await asked.controller.handle(Text(" three", 1))
    asked.controller.answers.checkpoint()
    expected = (ModeChange(0, "full → streaming", 10, "streaming"), ModeChange(7, "streaming → full", 12, "full"))
    assert conversation.leaf.switch_lines == expected
    await switch(asked, "full", "freeze", 13)
    await switch(asked, "freeze", "sync", 13)  # no token in between
    await asked.controller.handle(Finished("stopped", "one two three", Stats()))
    expected = (*expected, ModeChange(13, "full → sync", 13, "sync"))
    assert conversation.leaf.switch_lines == expected

    await asked.controller.branches.resume()
    await asked.controller.handle(Text(" four", 1))
    await switch(asked, "sync", "full", 20)
    await asked.controller.answers.abandon()
    await asked.controller.answers.ready()
    expected = (*expected, ModeChange(18, "sync → full", 20, "full"))
    assert conversation.leaf.switch_lines == expected

    await switch(asked, "full", "sync", 20)  # after the answer: saved lines stay
    assert not asked.view.switches[-2].removed
    assert conversation.leaf.switch_lines == (*expected, ModeChange(18, "full → sync", 20, "sync"))
    await switch(asked, "sync", "full", 20)  # and back
    assert conversation.leaf.switch_lines == expected
    await switch(asked, "full", "full", 20)  # another parameter
    assert asked.controller.answers.switch_positions == (10, 12, 13, 20)
    await asked.controller.branches.regenerate()
    await asked.controller.handle(Text("other", 1))
    await asked.controller.handle(Finished("eos", "other", Stats()))
    assert conversation.leaf.switch_lines == ()
    assert asked.controller.answers.switch_positions == (), "they were on another branch"
    await asked.controller.branches.select_sibling(1)
    assert asked.controller.answers.switch_positions == (10, 12, 13, 20)


async def test_a_switch_during_mounting_belongs_to_the_answer(asked, monkeypatch):
    add = asked.view.add_answer

    async def switch_meanwhile():
        answer = await add()
        await switch(asked, "full", "sync", 12)
        return answer

    await asked.controller.handle(Text("hello", 1))
    await asked.controller.handle(Finished("length", "hello", Stats(generated_tokens=1)))
    monkeypatch.setattr(asked.view, "add_answer", switch_meanwhile)
    await asked.controller.branches.resume()
    assert asked.controller.answers.switch_positions == (12,)
    await asked.controller.handle(Finished("eos", " you", Stats(generated_tokens=1)))
    assert asked.controller.state.conversation.leaf.switch_lines == (ModeChange(5, "full → sync", 12, "sync"),)


async def test_a_switch_during_saving_belongs_to_the_answer(asked, monkeypatch):
    async def switch_meanwhile():
        monkeypatch.undo()
        await switch(asked, "full", "sync", 12)

    await asked.controller.handle(Finished("eos", "hello", Stats(generated_tokens=1)))
    monkeypatch.setattr(asked.controller.answers, "save", switch_meanwhile)
    await asked.ask("two")
    await asked.controller.handle(Finished("eos", "hello", Stats(generated_tokens=1)))
    assert asked.controller.state.conversation.leaf.switch_lines == (ModeChange(0, "full → sync", 12, "sync"),)


async def test_an_answer_that_was_left_keeps_its_switch_and_is_marked_as_stopped(asked):
    left = asked.controller.state.conversation
    await asked.controller.handle(Text("one", 1))
    await switch(asked, "full", "sync", 12)
    await asked.controller.new()
    assert (left.leaf.text, left.leaf.ending) == ("one", "stopped")
    assert left.leaf.switch_lines == (ModeChange(3, "full → sync", 12, "sync"),)
    assert asked.controller.answers.switch_positions == ()
    await asked.controller.take(left)
    assert asked.controller.state.footer(left.leaf) == "stopped"


@pytest.mark.parametrize("when", ["saved", "mounted"])
async def test_an_early_stop_is_sent_after_the_question(chat, when):
    await chat.load()

    async def stop():
        chat.controller.stop()

    if when == "saved":
        chat.controller.answers.save = stop
    else:
        chat.view.while_mounting = stop
    await chat.ask("one")
    assert [type(command) for command in chat.client.sent] == [Chat, Stop]


async def test_a_stop_shows_immediately_during_prefill(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(Started(900, 0))
    before = chat.view.answers[-1].waiting
    chat.controller.stop()
    assert chat.view.answers[-1].waiting != before


async def test_queueing_a_question_does_not_lose_an_early_stop(chat, monkeypatch):
    async def queue_and_stop():
        monkeypatch.undo()
        await chat.ask("two")
        chat.controller.stop()

    await chat.load()
    monkeypatch.setattr(chat.controller.answers, "save", queue_and_stop)
    await chat.ask("one")
    assert [type(command) for command in chat.client.sent] == [Chat, Stop]


@pytest.mark.parametrize("when", ["saved", "mounted"])
async def test_a_question_is_not_sent_after_leaving_its_conversation(chat, when):
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


async def test_a_restart_while_an_answer_finishes_stays_loading(asked, monkeypatch):
    async def restart():
        monkeypatch.undo()
        await asked.controller.restart()

    monkeypatch.setattr(asked.controller.answers, "save", restart)
    await asked.controller.handle(DONE)
    assert asked.phase is Phase.LOADING
    await asked.engine_ended()


async def test_a_restart_before_sending_returns_the_question(chat, monkeypatch):
    async def end():
        monkeypatch.undo()
        await chat.controller.restart()
        await chat.load()

    await chat.load()
    monkeypatch.setattr(chat.controller.answers, "save", end)
    await chat.ask("one")
    await chat.engine_ended()
    assert (chat.turns, chat.view.prompt) == ([], "one")
    assert not [command for command in chat.client.sent if isinstance(command, Chat)]


@pytest.mark.parametrize("when", ["saved", "mounted"])
@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DOWN])
async def test_losing_the_engine_before_sending_returns_the_question(chat, monkeypatch, when, phase):
    add = chat.view.add_answer

    async def end():
        monkeypatch.undo()
        await (chat.controller.restart() if phase is Phase.LOADING else chat.controller.answers.down())
        await chat.ask("two")

    async def mount():
        await end()
        return await add()

    await chat.load()
    if when == "saved":
        monkeypatch.setattr(chat.controller.answers, "save", end)
    else:
        monkeypatch.setattr(chat.view, "add_answer", mount)
    await chat.ask("one")
    await chat.engine_ended()
    assert (chat.turns, chat.view.prompt, chat.view.queue) == ([], "one", (1, True))
    assert not [command for command in chat.client.sent if isinstance(command, Chat)]
    assert all(answer.removed for answer in chat.view.answers)
    await chat.load()
    await chat.controller.release_queue()
    assert chat.turns == ["two"]


# ---- Queued questions and commands: their order, stops, engine failures, taking them back


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


async def test_commands_and_questions_share_one_queue(chat):
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


async def test_a_queued_command_can_be_taken_back_or_run(chat):
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


async def test_questions_from_a_queued_command_go_to_the_end(chat):
    async def ask_meanwhile():
        await chat.ask("later")

    await chat.controller.defer("/next", ask_meanwhile)
    await chat.ask("one")
    await chat.load()
    assert (chat.turns, chat.view.queue) == (["one"], (1, False))
    await chat.controller.handle(DONE)
    assert chat.turns == ["one", "hi", "later"]


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DOWN])
async def test_a_command_mounted_as_loading_ends_is_not_lost(chat, phase):
    ran = []

    async def change():
        await (chat.load() if phase is Phase.READY else chat.controller.handle(Failed("no model", fatal=True)))

    async def run():
        ran.append("/next")

    chat.view.while_mounting = change
    await chat.controller.defer("/next", run)
    assert (ran, chat.view.prompt) == ((["/next"], "") if phase is Phase.READY else ([], "/next"))


async def test_a_stop_holds_the_queue_until_released(chat):
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


async def test_the_last_queued_question_can_be_taken_back(chat):
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


async def test_an_engine_crash_holds_the_queue(chat):
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


async def test_a_question_mounted_as_the_engine_gets_ready_is_sent(chat):
    chat.view.while_mounting = chat.load
    await chat.ask("one")
    assert [type(command) for command in chat.client.sent] == [Chat]
    assert not chat.controller.answers.queue


async def test_an_engine_crash_during_mounting_returns_the_question(chat):
    await chat.controller.handle(Crashed(1, ()))

    async def crash():
        await chat.controller.handle(Crashed(1, ()))

    chat.view.while_mounting = crash
    await chat.ask("one")
    assert chat.phase is Phase.DOWN
    assert chat.view.prompt == "one"
