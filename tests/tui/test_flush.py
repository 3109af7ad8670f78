"""The part of a growing answer that may be parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.tui.large_answers import closed_end

FENCE = "before\n```py\nx = 1\n```\nafter\n"
TABLE = "| a | b |\n|---|---|\n| 1 | 2 |\n\nafter\n"


def closed_and_tail(text: str) -> tuple[str, str]:
    end = closed_end(text, inside_line=False)
    return text[:end], text[end:]


@pytest.mark.parametrize(
    ("text", "closed", "tail"),
    [
        ("plain prose", "plain prose", ""),
        ("a\n```py\nx =", "a\n", "```py\nx ="),
        (FENCE, FENCE, ""),
        ("a\n``", "a\n", "``"),
        *((f"a\n{marker}", "a\n", marker) for marker in ("-", "1", "12.", "##")),
        ("a\n- b", "a\n- b", ""),
        ("a\n`code` is", "a\n`code` is", ""),
        ("````\n```\nstill open", "", "````\n```\nstill open"),
        ("a\n| x |\n|--", "a\n", "| x |\n|--"),
        (TABLE, TABLE, ""),
        ("1. item\n   ```\n   x\n   ```\ndone", "1. item\n   ```\n   x\n   ```\ndone", ""),
        ("~~~\n```\n~~~\nx", "~~~\n```\n~~~\nx", ""),
    ],
)
def test_open_blocks_are_held_back(text, closed, tail):
    assert closed_and_tail(text) == (closed, tail)


def closed_after_each(pieces):
    """The closed text after each piece, if only the rest is scanned again."""
    text = closed = ""
    for piece in pieces:
        text += piece
        new = text[len(closed) :]
        closed += new[: closed_end(new, bool(closed) and not closed.endswith("\n"))]
        yield closed, text


@given(st.lists(st.sampled_from(["`", "```", "\n", "|", "text ", "~~~", "- ", "\n\n"]), max_size=40))
def test_closed_text_is_always_a_prefix(pieces):
    assert all(text.startswith(closed) for closed, text in closed_after_each(pieces))


def test_a_fence_fed_by_character_never_leaks():
    assert [closed for closed, _ in closed_after_each("see:\n```py\ny | z\n")][-1] == "see:\n"
