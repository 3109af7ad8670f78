"""How much of an answer is drawn as Markdown.

Textual makes a widget of every paragraph, list item and table cell, and each layout visits all of them: a table of
150 x 60 blocks the screen for 20 s. So only the beginning of an answer becomes widgets; the rest is plain text in
slices, of which a growing answer redraws the last one.
"""

from __future__ import annotations

import re

MOST_WIDGETS = 160
WIDGETS_OF_ITEM = 4  # its box, bullet, body and paragraph
LINES_OF_WIDGET = 8  # of code: one widget, but highlighted whole
CHARACTERS_OF_WIDGET = 800
SLICE_LINES = 40
SLICE_CHARACTERS = 4000
_ITEM = re.compile(r"\s*(>\s*)*([-*+]|\d{1,9}[.)])\s")


def markdown_end(text: str) -> int:
    """Index up to which ``text`` is drawn as Markdown; it stays the same once more text follows.

    A fence or table that would make too many widgets is plain from its first line on.
    """
    end = position = 0
    widgets = 0.0
    fence = ""
    was_table = False
    for line in text.split("\n"):
        word = line.strip()
        is_table = word.startswith("|") and not fence
        if not fence and not (is_table and was_table):
            end = position  # a block may begin here
        widgets += _widgets(line, word, bool(fence), is_table)
        if widgets > MOST_WIDGETS:
            return end
        if fence and word.startswith(fence) and not word.strip(fence[0]):
            fence = ""
        elif not fence and word.startswith(("```", "~~~")):
            fence = word[: len(word) - len(word.lstrip(word[0]))]
        was_table = is_table
        position += len(line) + 1
    return len(text)


def slices(text: str) -> list[str]:
    """``text`` in parts of few lines; all but the last stay the same when more text follows."""
    parts: list[str] = []
    lines = 0
    for line in text.split("\n"):
        for start in range(0, max(len(line), 1), SLICE_CHARACTERS):
            piece = line[start : start + SLICE_CHARACTERS]
            if parts and lines < SLICE_LINES and len(parts[-1]) + len(piece) < SLICE_CHARACTERS and not start:
                parts[-1] += f"\n{piece}"
                lines += 1
            else:
                parts.append(piece)
                lines = 1
    return parts


def _widgets(line: str, word: str, is_code: bool, is_table: bool) -> float:
    """About how many widgets a line becomes."""
    size = len(line) / CHARACTERS_OF_WIDGET
    if is_code:
        return size + 1 / LINES_OF_WIDGET
    if is_table:
        return size + max(word.count("|") - 1, 1)
    if _ITEM.match(line):
        return size + WIDGETS_OF_ITEM
    return size + bool(word) + word.count(">", 0, 8)
