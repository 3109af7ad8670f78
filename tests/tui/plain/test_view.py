"""What is printed of an answer with a thought before it."""

from __future__ import annotations

import io

import pytest

from kvchat.conversations.conversation import Message
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Switched
from kvchat.tui.plain.view import LineWriter, PlainAnswer, PlainView


def message(text):
    return Message(parent=None, role="assistant", text=text)


async def printed(folds, text, withdrawn=0):
    """The lines of an answer that comes a character at a time."""
    out = io.StringIO()
    answer = PlainAnswer(LineWriter(out, out), folds)
    for character in text:
        answer.feed(character)
    await answer.withdraw(withdrawn)
    await answer.finish(message(text), "3 tok")
    return out.getvalue()


@pytest.mark.parametrize(
    ("folds", "text", "said"),
    [
        (False, "<think>one two</think>\n\nfine", "model: <think>one two</think>\n\nfine\n[3 tok]\n"),
        (True, "<think>one two</think>\n\nfine", "[thought, 2 words]\nmodel: fine\n[3 tok]\n"),
        (True, "<think>one two", "[thought, 2 words]\n[3 tok]\n"),
        (True, "<thin ice", "model: <thin ice\n[3 tok]\n"),
        (True, "told</think>fine", "model: told</think>fine\n[3 tok]\n"),
        (True, "fine", "model: fine\n[3 tok]\n"),
    ],
)
async def test_a_thought_is_a_line_where_it_is_folded(folds, text, said):
    assert await printed(folds, text) == said


async def test_words_taken_back_leave_a_folded_answer_going_on():
    out = io.StringIO()
    answer = PlainAnswer(LineWriter(out, out), folds=True)
    answer.feed("<think>a b</think>one two")
    assert await answer.withdraw(3) == "two"
    answer.feed("three")
    assert out.getvalue() == "[thought, 2 words]\nmodel: one twothree"


async def test_a_conversation_that_is_opened_folds_thoughts_too():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=True)
    view.folds_thoughts = True
    await view.show_messages([(message("<think>a b</think>fine"), "")], None)
    assert out.getvalue() == "[thought, 2 words]\nmodel: fine\n"


def test_a_badge_is_a_line_when_it_is_new():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=True)
    slow, capped = "slow: by stock operations", "capped: freeze forgets"
    for badges in ((), (slow,), (slow,), (slow, capped), (), (slow,)):
        view.show_snapshot(Snapshot("freeze", {}, 1, 1, 1, 1, 1, badges=badges))
    view.show_snapshot(None)
    assert out.getvalue() == f"[{slow}]\n[{capped}]\n[{slow}]\n"


async def test_a_switch_is_told_behind_the_sentence_that_is_being_said():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=False)
    answer = await view.add_answer()
    answer.feed("It was a dark")
    for before, mode in (("full", "sync"), ("sync", "streaming")):
        last = await view.add_switch(Switched(before, mode, {}, 10, 0, 0.0), None)
        if mode == "sync":
            await last.remove()
    answer.feed(" night. And")
    answer.feed(" so it goes on")
    await view.add_switch(Switched("streaming", "full", {}, 10, 0, 0.0), None)
    await answer.finish(message("It was a dark night. And so it goes on"), "3 tok")
    await view.add_switch(Switched("full", "freeze", {}, 10, 0, 0.0), None)
    assert out.getvalue().splitlines() == [
        "model: It was a dark night. ",
        "[sync to streaming, at 10 tok]",
        "And so it goes on",
        "[streaming to full, at 10 tok]",
        "[3 tok]",
        "[full to freeze, at 10 tok]",
    ]
