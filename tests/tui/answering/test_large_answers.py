"""How much of an answer becomes widgets: bounded whatever is in it, and the same while it grows."""

from __future__ import annotations

import pytest

from kvchat.tui.answering.large_answers import MOST_WIDGETS, SLICE_CHARACTERS, SLICE_LINES, markdown_end, slices

TABLE = "".join("| " + " | ".join(f"c{row}.{column}" for column in range(60)) + " |\n" for row in range(150))
LARGE = {
    "table": TABLE,
    "list": "".join(f"- item {n}\n" for n in range(1500)),
    "nested": "".join(f"{'  ' * (n % 4)}{n}. item\n" for n in range(1500)),
    "prose": "".join(f"Paragraph {n}.\n\n" for n in range(1500)),
    "code": "```py\n" + "".join(f"x{n} = {n}\n" for n in range(3000)) + "```\n",
    "quotes": "".join(f"> quote {n}\n" for n in range(1500)),
    "line": "word " * 100_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_only_the_beginning_becomes_widgets_and_stays_the_same_while_more_comes(name):
    text = f"It begins.\n\n{LARGE[name]}\nIt ends."
    end = markdown_end(text)
    assert end < len(text) / 4
    for cut in range(0, len(text), len(text) // 40):
        assert markdown_end(text[:cut]) in (cut, end)


def test_a_block_too_large_is_plain_from_its_first_line():
    assert markdown_end(f"Look:\n\n{TABLE}") == len("Look:\n\n")
    assert markdown_end(f"Look:\n\n{LARGE['code']}") == len("Look:\n\n")


def test_an_ordinary_answer_is_markdown_to_its_end():
    rows = "".join(f"| {n} | b | c |\n" for n in range(20))

    items, code = "- an item\n" * 20, "```py\nx = 1\n```\n"
    text = f"# Title\n\n{'Some words. ' * 40}\n\n{items}\n{code}\n{rows}\nEnd."
    assert markdown_end(text) == len(text)
    assert markdown_end("") == 0
    assert MOST_WIDGETS >= 150


@pytest.mark.parametrize("name", LARGE)
def test_slices_are_small_complete_and_the_same_while_more_comes(name):
    text = LARGE[name]
    parts = slices(text)
    assert all(len(part) <= SLICE_CHARACTERS and part.count("\n") < SLICE_LINES for part in parts)
    joined = "".join(parts) if name == "line" else "\n".join(parts)
    assert joined == text
    half = slices(text[: len(text) // 2])
    assert half[:-1] == parts[: len(half) - 1]
