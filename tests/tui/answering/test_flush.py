"""What may be parsed while an answer grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.tui.answering.flush import OpenBlock, interval

FENCE = "before\n```py\nx = 1\n```\nafter\n"
TABLE = "| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n"


@pytest.mark.parametrize(("cost", "seconds"), [(0.001, 0.05), (0.02, 0.08), (0.05, 0.2), (3.0, 0.4)])
def test_the_interval_is_four_times_the_cost_within_bounds(cost, seconds):
    assert interval(cost) == pytest.approx(seconds)


def closed_and_tail(text: str) -> tuple[str, str]:
    block = OpenBlock()
    return block.feed(text), block.tail


@pytest.mark.parametrize(
    ("text", "closed", "tail"),
    [
        ("plain prose", "plain prose", ""),
        ("a\n```py\nx =", "a\n", "```py\nx ="),
        (FENCE, FENCE, ""),
        ("a\n``", "a\n", "``"),
        ("a\n`code` is", "a\n`code` is", ""),
        ("````\n```\nstill open", "", "````\n```\nstill open"),
        ("a\n| x |\n|--", "a\n", "| x |\n|--"),
        (TABLE, TABLE, ""),
        ("1. item\n   ```\n   x\n   ```\ndone", "1. item\n   ```\n   x\n   ```\ndone", ""),
        ("~~~\n```\n~~~\nx", "~~~\n```\n~~~\nx", ""),
    ],
)
def test_open_blocks_wait(text, closed, tail):
    assert closed_and_tail(text) == (closed, tail)


@given(st.lists(st.sampled_from(["`", "```", "\n", "|", "text ", "~~~", "\n\n"]), max_size=40))
def test_pieces_in_any_cut_give_the_same_text(pieces):
    block = OpenBlock()
    assert "".join(block.feed(piece) for piece in pieces) + block.tail == "".join(pieces)


def test_a_fence_fed_by_character_never_leaks():
    block = OpenBlock()
    for character in "see:\n```py\ny | z\n":
        assert "`" not in block.feed(character)
    assert block.tail == "```py\ny | z\n"
