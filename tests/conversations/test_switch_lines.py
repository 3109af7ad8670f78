"""Where the marks of switches stand in the text of an answer, and what is said of them below it."""

from __future__ import annotations

import pytest

from kvchat.conversations.conversation import MARK, ModeChange, notes, with_marks


def at(*places: int) -> list[ModeChange]:
    return [ModeChange(place, f"to {number}") for number, place in enumerate(places, 1)]


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ("a word", " and more", f"a word {MARK} and more"),
        ("a wo", "rd, and more", f"a word, {MARK} and more"),
        ("over.", "\n\nNext", f"over. {MARK}\n\nNext"),
        ("# T", "itle here", f"# Title {MARK} here"),
        ("- one\n", "- two three", f"- one\n- two {MARK} three"),
        ("| a | b |\n|---|---|\n", "| 1 | 2 |\n", f"| a | b |\n|---|---|\n| 1 {MARK} | 2 |\n"),
        ("See:\n\n```py", "thon\nx = 1\n```\nSo it is", f"See:\n\n```python\nx = 1\n```\nSo {MARK} it is"),
        ("~~~\nx =", " 1\n~~~\n```\ny z\n```\nso it", f"~~~\nx = 1\n~~~\n```\ny z\n```\nso {MARK} it"),
        ("```\nx =", " 1\n", "```\nx = 1\n"),
        ("x", "。y", f"x。 {MARK}y"),
        ("the end", "", "the end"),
        ("", "the begin", "the begin"),
    ],
)
def test_it_stands_behind_the_word_that_was_being_said_in_no_code_and_leaves_markdown_whole(before, after, drawn):
    assert with_marks(before + after, at(len(before)), is_over=True) == drawn


def test_it_waits_for_the_end_of_the_word_so_that_what_is_drawn_stays():
    assert with_marks("a words", at(4), is_over=False) == "a words"
    assert with_marks("a words ", at(4), is_over=False) == f"a words {MARK} "


def test_several_are_numbered_and_told_in_their_order():
    assert with_marks("one two three", at(3, 7, 13), is_over=True) == f"one {MARK}¹ two {MARK}² three"
    assert notes(at(3, 7, 13)) == [f"{MARK}¹ to 1", f"{MARK}² to 2", f"{MARK}³ to 3"]
    assert notes(at(3)) == [f"{MARK} to 1"]
