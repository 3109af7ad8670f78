"""Where the lines of switches stand in the text of an answer."""

from __future__ import annotations

import pytest

from kvchat.conversations.switch_lines import with_lines

LINE = "── full -> sync ──"


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ("a word", " and more", f"a word {LINE} and more"),
        ("a wo", "rd, and more", f"a word, {LINE} and more"),
        ("over.", "\n\nNext", f"over. {LINE}\n\nNext"),
        ("", "# Title here", f"# Title {LINE} here"),
        ("- one\n", "- two three", f"- one\n- two {LINE} three"),
        ("| a | b |\n|---|---|\n", "| 1 | 2 |\n", f"| a | b |\n|---|---|\n| 1 {LINE} | 2 |\n"),
        ("See:\n\n", "```python\nx = 1\ny = 2\n```", f"See:\n\n```python\nx {LINE} = 1\ny = 2\n```"),
        ("x", "。y", f"x。 {LINE}y"),
        ("the end", "", f"the end {LINE}"),
        ("```\nx = 1\n```", "", f"```\nx = 1\n```\n\n{LINE}"),
        ("", "", f"\n\n{LINE}"),
    ],
)
def test_it_stands_behind_the_word_that_was_being_said_and_leaves_markdown_whole(before, after, drawn):
    assert with_lines(before + after, [(len(before), LINE)], is_over=True) == drawn


def test_it_waits_for_the_end_of_the_word_so_that_what_is_drawn_stays():
    assert with_lines("a wo", [(4, LINE)], is_over=False) == "a wo"
    assert with_lines("a word", [(4, LINE)], is_over=False) == "a word"
    assert with_lines("a word ", [(4, LINE)], is_over=False) == f"a word {LINE} "


def test_several_stand_in_their_order():
    assert with_lines("one two three", [(3, "── a ──"), (7, "── b ──"), (13, "── c ──")], is_over=True) == (
        "one ── a ── two ── b ── three ── c ──"
    )
