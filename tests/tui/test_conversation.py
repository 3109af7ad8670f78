"""Turns always alternate, whatever happens to an answer."""

from __future__ import annotations

from kvchat.protocol.messages import Sampling, Turn
from kvchat.tui.conversation import Conversation


def test_a_command_carries_everything():
    conversation = Conversation("be brief")
    conversation.ask("hi")
    assert conversation.command(Sampling()).turns == (Turn("system", "be brief"), Turn("user", "hi"))
    assert Conversation().command(Sampling()).turns == ()


def test_a_question_without_an_answer_is_withdrawn():
    conversation = Conversation()
    conversation.ask("one")
    conversation.answer("1")
    assert conversation.withdraw() == ""
    conversation.ask("two")
    assert conversation.withdraw() == "two"
    assert [turn.role for turn in conversation.turns] == ["user", "assistant"]


def test_reopening_drops_the_last_answer_once():
    conversation = Conversation()
    assert not conversation.reopen()
    conversation.ask("one")
    conversation.answer("1")
    assert conversation.last_answer() == "1"
    assert conversation.reopen()
    assert conversation.reopen()
    assert conversation.turns == [Turn("user", "one")]
    assert conversation.last_answer() == ""
