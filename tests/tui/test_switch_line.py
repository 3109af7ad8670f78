"""The line a live switch writes, and where it stands in an answer."""

from __future__ import annotations

import pytest

from kvchat.protocol.messages import Switched
from kvchat.tui.switch_line import SETTLED_TOKENS, with_lines
from kvchat.tui.widgets.messages import SwitchNote

LINE = "── full -> sync ──"


def note(speed: float | None = 41.0, **changes: object) -> SwitchNote:
    return SwitchNote(Switched("full", "speculative", {}, 14203, 0, 0.0, **changes), speed)


def test_the_second_figure_comes_after_64_tokens():
    line = note()
    assert str(line.content) == "── full -> speculative · 14,203 tok · 41 tok/s ──"
    line.count(1, now=10.0)
    line.count(SETTLED_TOKENS - 1, now=11.0)
    assert not line.settled
    line.count(1, now=12.0)
    assert str(line.content) == "── full -> speculative · 14,203 tok · 41 -> 32 tok/s ──"


def test_an_answer_that_ends_earlier_fills_it_in():
    line = note()
    line.close(now=5.0)
    assert not line.settled
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert "41 -> 58 tok/s" in str(line.content)


def test_a_speed_after_it_alone_is_told_from_one_before_it():
    line = note(None)
    line.count(1, now=10.0)
    line.count(29, now=10.5)
    line.close(now=10.5)
    assert str(line.content).endswith(" · then 58 tok/s ──")


@pytest.mark.parametrize("tokens", [0, SETTLED_TOKENS])
def test_too_few_tokens_or_too_little_time_tell_no_speed_and_those_of_the_next_answer_do_not_count(tokens):
    line = note()
    line.count(1, now=10.0)
    line.count(tokens, now=10.00001)
    line.close(now=10.00002)
    line.count(SETTLED_TOKENS, now=20.0)
    assert str(line.content) == str(note().content)


def test_nothing_known_nothing_said_and_what_was_reduced_is():
    assert str(note(None).content) == "── full -> speculative · 14,203 tok ──"
    assert "120 tok computed with less context" in str(note(reduced_tokens=120).content)


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
