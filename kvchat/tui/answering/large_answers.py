"""In which parts an answer is drawn: as Markdown, few widgets each, and as plain text.

Textual makes a widget of every paragraph, list item and table cell, each costs a millisecond or two when it is new, and
each layout visits all of them: as one Markdown a table of 150 x 60 blocks the screen for 20 s. So Markdown comes in
parts that are mounted one after the other, for so many widgets in all; the rest is plain text in slices, of which a
growing answer redraws the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvchat.tui.answering.flush import lines

MOST_WIDGETS = 160  # of an answer
MOST_OF_BLOCK = 64  # of a table or fence
ENOUGH_OF_PART = 20  # a part ends at the next line where one may begin
WIDGETS_OF_ITEM = 4  # its box, bullet, body and paragraph
LINES_OF_WIDGET = 8  # of code: one widget, but highlighted whole
CHARACTERS_OF_WIDGET = 800
SLICE_LINES = 40
SLICE_CHARACTERS = 4000
# Where a part may begin without a larger gap: headings, fences and quotes have a margin above.
_ANYWHERE = re.compile(r"([-*+]|\d{1,9}[.)])\s")
_AFTER_BLANK = re.compile(r"[^\s#>`~]")
_ITEM = re.compile(r"\s*(>\s*)*([-*+]|\d{1,9}[.)])\s")


@dataclass
class Part:
    """A part of an answer's text."""

    text: str
    is_markdown: bool

    @property
    def begins_with_item(self) -> bool:
        """A list begins the part, perhaps one that the part before began."""
        return self.is_markdown and bool(_ANYWHERE.match(self.text))


@dataclass
class _Block:
    """A line, a whole fence or a whole table; ``widgets`` is about how many it becomes."""

    text: str
    widgets: float
    is_large: bool = False
    may_begin: bool = True


def parts(text: str) -> list[Part]:
    """``text`` in parts, all but the last of which stay the same when more text follows.

    A fence or table that would make too many widgets is plain from its first line on, and Markdown goes on after it;
    where all others made too many the rest is plain.
    """
    made: list[Part] = []
    spent = in_part = 0.0
    for block in _blocks(text):
        fits = spent + block.widgets <= MOST_WIDGETS
        if not (fits or block.is_large):
            spent = MOST_WIDGETS
        is_markdown = fits and not (block.is_large and block.widgets > MOST_OF_BLOCK)
        is_full = is_markdown and block.may_begin and in_part >= ENOUGH_OF_PART
        if not made or made[-1].is_markdown != is_markdown or is_full:
            made.append(Part("", is_markdown))
            in_part = 0
        made[-1].text += block.text
        if is_markdown:
            spent += block.widgets
            in_part += block.widgets
    return made


def _blocks(text: str) -> Iterator[_Block]:
    """The text line by line, but fences and tables whole; the last one may go on."""
    block, fence, was_blank = _Block("", 0), "", True
    for line in lines(text):
        word = line.strip()
        is_table = word.startswith("|") and not fence
        goes_on = bool(fence) or (is_table and block.is_large and block.text.lstrip().startswith("|"))
        if not goes_on:
            if block.text:
                yield block
            block = _Block("", 0, may_begin=bool((_AFTER_BLANK if was_blank else _ANYWHERE).match(line)))
        block.text += line
        block.widgets += _widgets(line, word, bool(fence), is_table)
        if fence and word.startswith(fence) and not word.strip(fence[0]):
            fence = ""
        elif not fence and word.startswith(("```", "~~~")):
            fence = word[: len(word) - len(word.lstrip(word[0]))]
        block.is_large = block.is_large or bool(fence) or is_table
        was_blank = not word
    if block.text:
        yield block


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
