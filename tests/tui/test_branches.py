"""Branches: questions edited and answered again, answers gone on with; what was said before stays."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Finished, Rebuild, Text, Turn
from kvchat.tui.state import Phase


def done(text, reason="eos"):
    return Finished(reason, text, Stats(generated_tokens=1))


@pytest.fixture
async def talk(chat):
    """Two questions, answered."""
    await chat.load()
    for question, answer in (("one", "1"), ("two", "2")):
        await chat.ask(question)
        await chat.controller.handle(done(answer))
    return chat


@pytest.fixture
def branches(talk):
    return talk.controller.branches


async def test_all_need_an_engine_at_rest_and_something_said(chat):
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


async def test_regenerating_stopped_before_the_first_word_shows_the_earlier_answer(talk, branches):
    await branches.regenerate()
    await talk.controller.handle(done("", "stopped"))
    assert talk.turns == ["one", "1", "two", "2"]
    assert talk.view.shown[-1][0] == ["2"]
    assert talk.view.prompt == ""


async def test_a_chosen_question_is_answered_again(talk, branches):
    path = talk.controller.state.conversation.path
    talk.view.chosen = path[1].id
    await branches.regenerate()
    assert talk.client.sent[-1].turns == (Turn("user", "one"),)
    assert talk.view.shown[-1] == ([], [], path[0].id)


async def test_an_edited_question_is_asked_on_a_branch_of_its_own(talk, branches):
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


async def test_what_is_edited_stays_pinned(talk, branches):
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


async def test_what_is_edited_stays_pinned_also_where_it_waits(talk, branches):
    conversation = talk.controller.state.conversation
    conversation.pin(conversation.path[2].id, True)
    branches.edit()
    talk.controller.rebuild()
    await talk.ask("due")
    await talk.controller.answers.ready()
    assert talk.client.sent[-1].turns[-1] == Turn("user", "due", pinned=True)


async def test_an_edited_question_leaves_no_answer_without_its_question(talk, branches):
    branches.edit()
    await branches.regenerate()
    with pytest.raises(UsageError, match="busy"):
        await talk.ask("due")
    await talk.controller.handle(done("II"))
    assert talk.turns == ["one", "1", "two", "II"]
    await talk.ask("due")
    assert talk.turns == ["one", "1", "due"]


async def test_editing_ends_without_a_trace(talk, branches):
    talk.view.prompt = "a draft"
    with pytest.raises(UsageError, match="another text"):
        branches.edit()
    assert talk.controller.state.edited is None
    talk.view.prompt = ""
    branches.edit()
    branches.stop_editing()
    await talk.ask("three")
    assert talk.turns == ["one", "1", "two", "2", "three"]


async def test_an_answer_is_gone_on_with(talk, branches):
    await branches.resume()
    assert talk.client.sent[-1].turns[-1] == Turn("assistant", "2")
    assert talk.view.answers[-1].text == "2"
    await talk.controller.handle(Text(" and", 1))
    talk.controller.answers.checkpoint()
    assert talk.turns[-1] == "2 and"
    await talk.controller.handle(done(" and a half"))
    assert talk.turns == ["one", "1", "two", "2 and a half"]


async def test_going_on_stopped_at_once_keeps_the_answer(talk, branches):
    await branches.resume()
    await talk.controller.handle(done("", "stopped"))
    assert talk.turns == ["one", "1", "two", "2"]


async def test_a_question_is_taken_back_and_stays_as_a_branch(talk, branches):
    await branches.undo()
    assert talk.turns == ["one", "1"]
    assert talk.view.prompt == "two"
    await talk.ask("three")
    await talk.controller.handle(done("3"))
    await branches.select_sibling(1)
    assert talk.turns == ["one", "1", "two", "2"]


async def test_while_the_engine_works_branches_wait(talk, branches):
    talk.controller.rebuild()
    assert talk.client.sent[-1] == Rebuild()
    assert talk.phase is Phase.PREFILL
    with pytest.raises(UsageError, match="busy"):
        await branches.undo()


async def test_an_answer_is_edited_and_gone_on_from_as_a_sibling(chat):
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
