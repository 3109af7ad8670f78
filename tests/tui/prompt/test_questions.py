"""The question that is sent of a prompt's text."""

from __future__ import annotations

import pytest

from kvchat.conversations.conversation import Conversation
from kvchat.protocol.messages import Sampling
from kvchat.tui.prompt.arguments import compose
from kvchat.tui.prompt.mentions import Part
from kvchat.tui.state import ChatState


@pytest.mark.parametrize(
    "text", ["//mode is a command", "// x = 1;", "and/or", r"\@makeatletter \_x\_", r"C:\new\table"]
)
def test_what_is_typed_is_sent_to_the_letter(text):
    assert compose([Part(text)], ChatState(Conversation(), Sampling(), "full")) == text


def test_files_come_before_the_question(tmp_path):
    (tmp_path / "a.txt").write_text("a fact")
    text = compose([Part(f"What does @{tmp_path}/a.txt say?")], ChatState(Conversation(), Sampling(), "full"))
    assert text.index("a fact") < text.index("What does")


def test_a_text_in_place_of_an_answer_is_taken_as_it_is():
    conversation = Conversation()
    conversation.ask("one")
    conversation.answer("hi")
    state = ChatState(conversation, Sampling(), "full")
    state.edited = conversation.path[-1].id
    assert compose([Part("//mode @nothing")], state) == "//mode @nothing"
