"""Thoughts are told from answers, also while the text still comes."""

from __future__ import annotations

import pytest

from kvchat.thoughts import split, summarize


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("", "", ""),
        ("Hello.", "", "Hello."),
        ("  Hello.", "", "  Hello."),
        ("<th", "", ""),
        ("\n<think>\nWell", "Well", ""),
        ("<think>\nWell.\n\nSo.</think>\n\nHello <b>you</b>.", "Well.\n\nSo.", "Hello <b>you</b>."),
        ("Well, `</think>` ends it.\n```\n</think>\n```", "", "Well, `</think>` ends it.\n```\n</think>\n```"),
        ("[THINK]Well.[/THINK]Hello.", "Well.", "Hello."),
        ("<seed:think>Well.</seed:think>Hello.", "Well.", "Hello."),
        ("<Thinking>Well.</Thinking>Hello.", "Well.", "Hello."),
        ("<reasoning>\nWell.\n</reasoning>\nHello.", "Well.", "Hello."),
        ("<|begin_of_thought|>Well.<|end_of_thought|>Hello.", "Well.", "Hello."),
        ("◁think▷Well.◁/think▷Hello.", "Well.", "Hello."),
        ("<div>", "", "<div>"),
        ("<think></think>\n\nHello.", "", "Hello."),
        ("I write <think> in the middle", "", "I write <think> in the middle"),
        ("I explain <think> and </think>.", "", "I explain <think> and </think>."),
        ("<thinker> is a word", "", "<thinker> is a word"),
    ],
)
def test_texts(text, thought, answer):
    assert split(text) == (thought, answer)


def test_a_thought_that_the_prompt_has_begun_ends_with_its_tag():
    assert split("Well.\n</think>\n\nI say </think>.", "</think>") == ("Well.", "I say </think>.")
    assert split("<think>Well.</think>Hello.", "</think>") == ("Well.", "Hello.")
    assert split("Well. </think>", "[/THINK]") == ("Well. </think>", "")
    assert split("<plan>Well.</plan>Hello.", "</plan>") == ("Well.", "Hello.")


def test_a_tag_that_nothing_ends_is_text_once_the_answer_is_over():
    text = "<think> is a tag."
    assert split(text) == ("is a tag.", "")
    assert split(text, ending="eos") == ("", text)
    assert split(text, ending="length") == ("is a tag.", "")
    assert split("<th", ending="stopped") == ("", "<th")
    assert split("Well.", "</think>", ending="eos") == ("Well.", "")


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
