"""Thoughts are told from answers, also while the text still comes."""

from __future__ import annotations

import pytest

from kvchat.tui.answering.thinking import split, summarize


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("", "", ""),
        ("Hello.", "", "Hello."),
        ("  Hello.", "", "  Hello."),
        ("<th", "", ""),
        ("\n<think>\nWell", "Well", ""),
        ("<think>\nWell.\n\nSo.</think>\n\nHello <b>you</b>.", "Well.\n\nSo.", "Hello <b>you</b>."),
        ("Well.\n</think>\n\nHello.", "Well.", "Hello."),
        ("<think></think>\n\nHello.", "", "Hello."),
        ("I write <think> in the middle", "", "I write <think> in the middle"),
        ("I explain <think> and </think>.", "", "I explain <think> and </think>."),
        ("<thinker> is a word", "", "<thinker> is a word"),
    ],
)
def test_texts(text, thought, answer):
    assert split(text) == (thought, answer)


def test_a_growing_answer_only_grows():
    text = "<think>one\ntwo</think>\n\nHello there."
    seen = ""
    for end in range(len(text) + 1):
        answer = split(text[:end])[1]
        assert answer.startswith(seen)
        seen = answer
    assert seen == "Hello there."


def test_the_folded_line():
    assert summarize("one two", is_open=True) == "▸ thinking … 2 words"
    assert summarize("one two", is_open=False) == "▸ thought, 2 words"
