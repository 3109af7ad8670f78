"""Branches: questions are edited and answered again, answers continued; earlier messages stay."""

from dataclasses import replace

import pytest
from support.app_driver import ask, focus, press, prompt, submit
from support.keeping import save_changes

from kvchat.conversations.store import ConversationStore
from kvchat.errors import TooMuchPinnedError, UsageError
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Chat, Failed, Finished, Rebuild, Resume, Switch, Text, Turn
from kvchat.tui.commands.chat import pin
from kvchat.tui.state import Phase
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.transcript import Transcript


def done(text, reason="eos"):
    return Finished(reason, text, Stats(generated_tokens=1))


@pytest.fixture
async def talk(chat):
    """Two answered questions."""
    await chat.load()
    for question, answer in (("one", "1"), ("two", "2")):
        await chat.ask(question)
        await chat.controller.handle(done(answer))
    return chat


@pytest.fixture
def branches(talk):
    return talk.controller.branches


async def test_branch_commands_need_an_idle_engine_and_messages(chat):
    branches = chat.controller.branches
    for act in (branches.regenerate, branches.resume, branches.undo, lambda: branches.select_sibling(1)):
        with pytest.raises(UsageError, match="busy"):
            await act()
    with pytest.raises(UsageError, match="busy"):
        branches.edit()
    await chat.load()
    for act in (branches.regenerate, branches.undo):
        with pytest.raises(UsageError, match="no question yet"):
            await act()
    with pytest.raises(UsageError, match="no answer"):
        await branches.resume()
    with pytest.raises(UsageError, match="only one branch"):
        await branches.select_sibling(1)


async def test_regenerating_keeps_the_answer_as_a_sibling(talk, branches):
    question = talk.controller.state.conversation.path[2].id
    await branches.regenerate()
    assert talk.client.sent[-1].turns[-1] == Turn("user", "two")
    assert talk.view.shown[-1] == ([], [], question)
    await talk.controller.handle(done("zwei"))
    assert talk.turns == ["one", "1", "two", "zwei"]
    assert talk.view.answers[-1].receipt == "1 tok · full · branch 2 of 2"
    await branches.select_sibling(1)
    assert talk.turns[-1] == "2"
    assert talk.view.shown[-1] == (["2"], ["1 tok · full · branch 1 of 2"], question)
    await branches.select_sibling(-1)
    assert talk.turns[-1] == "zwei"


async def test_stopping_a_regeneration_early_restores_the_answer(talk, branches):
    await branches.regenerate()
    await talk.controller.handle(done("", "stopped"))
    assert talk.turns == ["one", "1", "two", "2"]
    assert talk.view.shown[-1][0] == ["2"]
    assert talk.view.prompt == ""


@pytest.fixture
async def answered(talk):
    """The id of the last answer; the question after it was left unanswered and then reopened."""
    await talk.controller.open_archive()
    last = talk.controller.state.conversation.leaf.id
    await talk.ask("three")
    await talk.controller.new()
    await talk.controller.handle(done("", "stopped"))
    await talk.controller.open_last()
    return last


async def test_an_unanswered_question_is_replaced_by_the_next(talk, answered):
    assert talk.turns[-1] == "three"
    await talk.ask("four")
    assert talk.view.shown[-1] == ([], [], answered)
    assert talk.turns == ["one", "1", "two", "2", "four"]
    await talk.ask("five")
    assert talk.turns[-1] == "four", "its answer has begun"


async def test_stopping_removes_a_reopened_unanswered_question(talk, branches, answered):
    await branches.regenerate()
    await talk.controller.handle(done("", "stopped"))
    assert talk.view.shown[-1] == ([], [], answered)
    assert (talk.turns, talk.view.prompt) == (["one", "1", "two", "2"], "three")


@pytest.fixture
def while_clearing(talk, monkeypatch):
    """Runs a function the next time that the transcript is cleared below a message."""

    def run(act):
        async def show(*shown):
            monkeypatch.undo()
            await act()

        monkeypatch.setattr(talk.view, "show_messages", show)

    return run


@pytest.mark.parametrize(("command", "last"), [("regenerate", "two"), ("resume", "2")])
async def test_questions_during_clearing_are_queued(talk, branches, while_clearing, command, last):
    while_clearing(lambda: talk.ask("three"))
    await getattr(branches, command)()
    assert (talk.client.sent[-1].turns[-1].content, talk.view.queue) == (last, (1, False))
    await talk.controller.handle(done("!"))
    assert talk.client.sent[-1].turns[-1] == Turn("user", "three")


@pytest.mark.parametrize("command", ["regenerate", "resume"])
async def test_a_new_conversation_during_clearing_is_asked_nothing(talk, branches, while_clearing, command):
    sent = list(talk.client.sent)
    while_clearing(talk.controller.new)
    await getattr(branches, command)()
    assert (talk.client.sent, talk.phase) == (sent, Phase.READY)
    assert talk.view.answers[-1].removed


async def test_the_selected_question_is_regenerated(talk, branches):
    path = talk.controller.state.conversation.path
    talk.view.chosen = path[1].id
    await branches.regenerate()
    assert talk.client.sent[-1].turns == (Turn("user", "one"),)
    assert talk.view.shown[-1] == ([], [], path[0].id)


async def test_an_edited_question_starts_a_new_branch(talk, branches):
    path = talk.controller.state.conversation.path
    talk.view.chosen = path[0].id
    branches.edit()
    assert (talk.view.prompt, talk.view.edited) == ("one", path[0].id)
    await talk.ask("uno")
    assert talk.view.shown[-1] == ([], [], None)
    assert talk.view.questions[-1].footer == "branch 2 of 2"
    assert talk.client.sent[-1].turns == (Turn("user", "uno"),)
    assert talk.controller.state.edited is None
    await talk.controller.handle(done("I"))
    talk.view.chosen = None
    await branches.select_sibling(-1)
    assert talk.turns == ["one", "1", "two", "2"]
    assert talk.view.shown[-1] == (
        ["one", "1", "two", "2"],
        ["branch 1 of 2", *["1 tok · full", "", "1 tok · full"]],
        None,
    )


async def test_an_unrelated_branch_shows_no_stored_figures(talk, branches):
    state = talk.controller.state
    await branches.regenerate()
    await talk.controller.handle(done("zwei"))
    await branches.select_sibling(1)
    assert state.is_stored, "the beginning is the same"
    talk.view.chosen = state.conversation.path[0].id
    branches.edit()
    await talk.ask("uno")
    await talk.controller.handle(done("I"))
    assert state.is_stored
    talk.view.chosen = None
    await branches.select_sibling(1)
    assert not state.is_stored
    assert talk.view.snapshots[-1] is state.snapshot


async def test_edited_messages_stay_pinned(talk, branches):
    conversation = talk.controller.state.conversation
    first = conversation.path[0]
    conversation.pin(first.id, True)
    talk.view.chosen = first.id
    branches.edit()
    talk.view.prompt = ""
    await talk.ask("uno")
    assert talk.client.sent[-1].turns == (Turn("user", "uno", pinned=True),)
    assert talk.view.questions[-1].footer.endswith("◆ pinned")
    await talk.controller.handle(done("I"))
    conversation.pin(conversation.path[1].id, True)
    talk.view.chosen = conversation.path[1].id
    branches.edit()
    talk.view.prompt = ""
    await talk.ask("II")
    await talk.controller.handle(done(" and III"))
    assert conversation.turns == [Turn("user", "uno", pinned=True), Turn("assistant", "II and III", pinned=True)]
    await talk.ask("due")
    assert not conversation.path[-1].pinned


async def test_queued_edits_stay_pinned(talk, branches):
    conversation = talk.controller.state.conversation
    conversation.pin(conversation.path[2].id, True)
    branches.edit()
    talk.controller.rebuild()
    await talk.ask("due")
    await talk.controller.answers.ready()
    assert talk.client.sent[-1].turns[-1] == Turn("user", "due", pinned=True)


async def test_an_edit_waits_for_a_regeneration(talk, branches):
    branches.edit()
    await branches.regenerate()
    with pytest.raises(UsageError, match="busy"):
        await talk.ask("due")
    await talk.controller.handle(done("II"))
    assert talk.turns == ["one", "1", "two", "II"]
    await talk.ask("due")
    assert talk.turns == ["one", "1", "due"]


async def test_canceled_editing_leaves_no_trace(talk, branches):
    talk.view.prompt = "a draft"
    with pytest.raises(UsageError, match="another text"):
        branches.edit()
    assert talk.controller.state.edited is None
    talk.view.prompt = ""
    branches.edit()
    branches.stop_editing()
    await talk.ask("three")
    assert talk.turns == ["one", "1", "two", "2", "three"]


async def test_an_answer_is_resumed(talk, branches):
    await branches.resume()
    assert talk.client.sent[-1].turns[-1] == Turn("assistant", "2")
    assert talk.view.answers[-1].text == "2"
    await talk.controller.handle(Text(" and", 1))
    talk.controller.answers.checkpoint()
    assert talk.turns[-1] == "2 and"
    await talk.controller.handle(done(" and a half"))
    assert talk.turns == ["one", "1", "two", "2 and a half"]


async def test_stopping_a_continuation_keeps_the_answer(talk, branches):
    await branches.resume()
    await talk.controller.handle(done("", "stopped"))
    assert talk.turns == ["one", "1", "two", "2"]


async def test_an_undone_question_stays_as_a_branch(talk, branches):
    await branches.undo()
    assert talk.turns == ["one", "1"]
    assert talk.view.prompt == "two"
    await talk.ask("three")
    await talk.controller.handle(done("3"))
    await branches.select_sibling(1)
    assert talk.turns == ["one", "1", "two", "2"]


async def test_branch_commands_are_refused_while_the_engine_works(talk, branches):
    talk.controller.rebuild()
    assert talk.client.sent[-1] == Rebuild()
    assert talk.phase is Phase.PREFILL
    with pytest.raises(UsageError, match="busy"):
        await branches.undo()


async def test_an_edited_answer_continues_as_a_sibling(chat):
    await chat.load()
    await chat.ask("one")
    await chat.controller.handle(done("hi"))
    first = chat.controller.state.conversation.leaf
    chat.view.chosen, chat.view.prompt = first.id, ""
    chat.controller.branches.edit()
    assert (chat.view.prompt, chat.controller.state.edits_answer) == ("hi", True)
    chat.view.prompt = ""
    await chat.ask("Hello")
    assert [turn.content for turn in chat.client.sent[-1].turns] == ["one", "Hello"]
    await chat.controller.handle(Text(" you", 1))
    await chat.controller.handle(Finished("eos", " you", Stats(generated_tokens=1)))
    assert chat.turns == ["one", "Hello you"]
    assert [message.text for message in chat.controller.state.conversation.siblings(first.id)] == ["hi", "Hello you"]
    assert chat.view.answers[-1].text == "Hello you"


# ---- ``/pin``: saved with the conversation, sent to the engine at once and with every question


def pinned(command):
    return [turn.content for turn in command.turns if turn.pinned]


async def test_pinned_messages_are_sent_to_the_engine(talk):
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


async def test_pin_accepts_none_and_system(talk):
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    await pin(talk.controller, "none")
    assert pinned(talk.client.sent[-1]) == []
    await pin(talk.controller, "none")
    assert len(talk.view.toasts) == 4
    assert talk.view.toasts[-2].startswith("Unpinned 2 ")
    with pytest.raises(UsageError, match="system prompt"):
        await pin(talk.controller, "system")
    talk.controller.set_system("be brief")
    await pin(talk.controller, "system")
    assert talk.client.sent[-1] == Switch("", {"pin_system": True})
    assert "is pinned" in talk.view.notes[-1]


@pytest.fixture
async def long_talk(talk):
    """Three questions, the third too long to be pinned."""
    await talk.ask("three")
    stats = Stats(prompt_tokens=9_000, generated_tokens=1, total_tokens=9_001)
    await talk.controller.handle(Finished("eos", "3", stats))
    return talk


async def test_pinning_over_half_the_context_is_refused(long_talk):
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


async def test_the_engine_checks_pins_of_unknown_length(chat):
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


async def test_a_pin_refused_by_the_engine_is_removed(talk):
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    refused = Failed("Too much is pinned.", "", "", TooMuchPinnedError.__name__, False)
    await talk.controller.handle(refused)
    assert pinned(talk.client.sent[-1]) == ["one"]
    assert "unpinned" in talk.view.toasts[-1]
    await talk.controller.handle(refused)  # for a question asked before that
    assert [message.pinned for message in talk.controller.state.conversation.path] == [True, False, False, False]


async def test_a_refusal_keeps_pins_of_other_branches(talk):
    chat = talk.controller
    await pin(chat, "2")
    before = chat.state.conversation.path[2]
    chat.branches.edit()
    await talk.ask("a longer two")
    await chat.handle(Failed("Too much is pinned.", "", "", TooMuchPinnedError.__name__, False))
    assert chat.state.conversation.messages[before.id].pinned


@pytest.mark.parametrize("argument", ["0", "3", "-1", "cat"])
async def test_pinning_a_missing_question_is_refused(talk, argument):
    with pytest.raises(UsageError, match="2 questions"):
        await pin(talk.controller, argument)


async def test_pins_are_saved_with_the_conversation(talk, tmp_path):
    conversation = talk.controller.state.conversation
    await pin(talk.controller, "1")
    store = ConversationStore(tmp_path / "kept.db")
    save_changes(store, conversation)
    await pin(talk.controller, "1")
    await pin(talk.controller, "2")
    save_changes(store, conversation)
    assert [message.pinned for message in store.load(conversation.id).path] == [False, False, True, False]
    assert [turn.pinned for turn in conversation.fork(conversation.path[2].id).turns] == [False, False, True]
    store.close()


async def test_queued_questions_survive_branch_changes(running):
    def shown():
        return [(question.text, question.queued) for question in app.chat.query(Question)]

    async with running() as (app, _pilot, until):
        chat = app.controller
        submit(app, "slow")
        await until(lambda: chat.state.phase is Phase.ANSWERING)
        submit(app, "hello")
        await until(lambda: chat.answers.queue)
        press(app, "escape")
        await until(lambda: chat.state.phase is Phase.READY)
        press(app, "f5")
        await until(lambda: chat.state.phase is Phase.ANSWERING)
        assert shown() == [("slow", False), ("hello", True)]
        press(app, "escape")
        await until(lambda: chat.state.phase is Phase.READY)
        await chat.branches.undo()
        assert shown() == [("hello", True)]
        prompt(app).clear()
        press(app, "enter")  # sends what is queued, not the first example
        await until(lambda: shown() == [("hello", False)] and chat.state.phase is Phase.READY)
        await chat.new()
        assert shown() == []


async def test_a_pinned_message_is_marked_in_the_transcript(running):
    async with running() as (app, pilot, until):
        await ask(app, "hello there")
        transcript = app.chat.query_one(Transcript)
        await focus(transcript)
        await pilot.press("up", "up")
        await until(lambda: transcript.chosen == app.chat.query_one(Question).message)
        await pilot.press("p")
        await until(lambda: "◆ pinned" in str(app.chat.query_one(Question).content))
        assert transcript.chosen
        await pilot.press("p")
        await until(lambda: "◆ pinned" not in str(app.chat.query_one(Question).content))
