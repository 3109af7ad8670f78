"""The question that is sent of a prompt's text."""

from __future__ import annotations

import pytest
from support.app_driver import prompt, typed

from kvchat.conversations.conversation import Conversation, Message
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Sampling
from kvchat.tui.prompt.arguments import compose
from kvchat.tui.prompt.history import BYTES_PER_TOKEN, bytes_per_token, estimate
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


# ---- The tokens of a question before it is sent


def answer(text, tokens):
    return Message(parent=None, role="assistant", text=text, stats=Stats(generated_tokens=tokens))


def test_the_answers_so_far_tell_how_long_a_token_is():
    assert bytes_per_token([answer("a" * 600, 100), answer("b" * 300, 80)]) == 5
    assert bytes_per_token([answer("a" * 60, 10)]) == BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("text", "is_typed", "tokens"),
    [("word " * 8, True, 10), ("@notes.txt", True, 103), ("@notes.txt", False, 2), ("@nothing.txt ...", True, 4)],
)
def test_files_count_where_they_are_mentioned(tmp_path, monkeypatch, text, is_typed, tokens):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x" * 402)
    assert estimate([Part(text, is_typed)], 4.0) == tokens


async def test_the_count_is_shown_while_one_types_and_what_does_not_fit_before_it_is_sent(running):
    async with running() as (app, _pilot, until):
        prompt(app).insert("word " * 80)
        await until(lambda: prompt(app).border_subtitle == "≈ 100 tokens")
        prompt(app).insert("word " * 20_000)
        await until(lambda: "16,384" in prompt(app).border_subtitle)
        prompt(app).load_text("/budget 128")
        await until(lambda: prompt(app).border_subtitle == "")
        prompt(app).load_text("")
        typed(app, "hello")
        await until(lambda: prompt(app).border_subtitle == "")
