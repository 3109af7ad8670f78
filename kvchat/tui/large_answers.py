"""Splits an answer into parts that are drawn one by one, as Markdown of a few widgets or as plain text.

Textual makes a widget of every paragraph, list item and table cell. A new widget costs one or two milliseconds, and
each layout visits all: a table of 150 x 60, drawn at once, blocks the screen for 20 s. So Markdown is mounted in parts
until an answer has ``MOST_WIDGETS``; the rest is plain text.

Textual re-parses the last block on every append: 5 ms in prose, but 49 ms in a fence of 300 tokens and 141 ms in a
table of 60 rows. So an open fence or table stays plain text until it closes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

MOST_WIDGETS = 90  # of an answer
MOST_OF_BLOCK = 64  # of a table, a fence or a line
# Widgets after which a part ends at the next line that may begin a new one; and widgets after which headings, fences
# and quotes may begin one too, although their margin then widens the gap above them.
ENOUGH_OF_PART, ENOUGH_FOR_GAP = 20, 25
WIDGETS_OF_TABLE = 2  # around its cells
WIDGETS_OF_FENCE = 3  # around its code; one of them scrolls
LINES_OF_WIDGET = 8  # of code whose highlighting costs as much as a widget
CHARACTERS_OF_WIDGET = 800
MARKS = "*_~`<>&[]{}!\\$%+-:=@^#"  # at which the parser stops in a line
MARKS_OF_WIDGET = 50
LONGEST_LINE = 3000  # characters; parsing so many open brackets or addresses, as models repeat them, takes 0.3 s
DEEPEST = 10  # nested items and quotes; the parser drops those deeper than ``MOST_NESTED``
MOST_NESTED = 100
_ANYWHERE = re.compile(r"([-*+]|\d{1,9}[.)])\s")
_AFTER_BLANK = re.compile(r"[^\s#>`~]")
_DEFINITION = re.compile(r"(?m)^ {0,3}\[[^\]\n]{1,999}\]:[^\n]{1,2000}$")
MOST_DEFINITIONS = 200  # of links
MOST_OF_DEFINITION = 5
_WITH_GAP = re.compile(r"\S")
_MARKS = re.compile(r"(\s*(>|([-*+]|\d{1,9}[.)])(?=\s)))*")
_BEGINNING = re.compile(r"`{0,2}|~{0,2}|[-*+]|#{1,6}|\d{1,9}[.)]?")


@dataclass
class Part:
    text: str
    is_markdown: bool

    @property
    def begins_with_item(self) -> bool:
        """True if it begins with an item of a list, whose beginning may be in the part before."""
        return self.is_markdown and bool(_ANYWHERE.match(self.text))


@dataclass
class _Block:
    """A line, a whole fence or a whole table, which becomes about ``widgets`` widgets.

    It may begin a new part once the current one has ``begins_at`` widgets. If it ``is_open``, the next line may belong
    to it.
    """

    text: str
    widgets: float
    begins_at: float = 0
    is_open: bool = False


def parts(text: str) -> list[Part]:
    """Return the parts of ``text``; more text changes only the last one.

    A fence, table or line with too many widgets becomes plain text, and Markdown continues after it. Once all others
    together have too many, the rest becomes plain text.
    """
    made: list[Part] = []
    spent = in_part = 0.0
    for block in _blocks(text):
        is_too_large = block.widgets > MOST_OF_BLOCK
        widgets = WIDGETS_OF_TABLE if is_too_large else block.widgets
        fits = spent + widgets <= MOST_WIDGETS
        is_markdown = fits and not is_too_large
        is_full = is_markdown and in_part >= block.begins_at
        if not made or made[-1].is_markdown != is_markdown or is_full:
            made.append(Part("", is_markdown))
            in_part = 0
        made[-1].text += block.text
        spent = spent + widgets if fits else MOST_WIDGETS + 1
        in_part += widgets
    return made


def definitions(text: str) -> str:
    """Return the lines outside code that define links, ``[1]: https://...``, which all parts need."""
    if not _DEFINITION.search(text):
        return ""
    # Only short lines: one that turns out not to be a definition is parsed as text, which costs as much.
    found = (_DEFINITION.match(block.text) for block in _blocks(text) if block.widgets < MOST_OF_DEFINITION)
    return "\n".join([match[0] for match in found if match][:MOST_DEFINITIONS])


def closed_end(text: str, inside_line: bool) -> int:
    """Return the index up to which ``text`` may be parsed: before a fence or table that is open at its end.

    A last line that may still become a fence, an item or a heading is left out too. If ``text`` begins ``inside_line``,
    the rest of that line is always included.
    """
    begun = len(lines(text)[0]) if text and inside_line else 0
    *_, last = [_Block("", 0), *_blocks(text[begun:])]
    waits = last.is_open or _BEGINNING.fullmatch(last.text.strip(" "))
    return len(text) - len(last.text) if waits else len(text)


def _blocks(text: str) -> Iterator[_Block]:
    """Yield the text line by line, with fences and tables whole; the last block may be incomplete."""
    block, fence, was_blank = _Block("", 0), "", True
    for line in lines(text):
        word = line.strip()
        is_table = word.startswith("|") and not fence
        is_inside = bool(fence) or (is_table and block.text.lstrip().startswith("|"))
        if not is_inside:
            if block.text:
                yield block
            around = WIDGETS_OF_TABLE if is_table else WIDGETS_OF_FENCE if word.startswith(("```", "~~~")) else 0
            begins_at: float = ENOUGH_FOR_GAP if was_blank and _WITH_GAP.match(line) else inf
            if (_AFTER_BLANK if was_blank else _ANYWHERE).match(line):
                begins_at = ENOUGH_OF_PART
            block = _Block("", around, begins_at)
        block.text += line
        block.widgets += _widgets(line, word, bool(fence), is_table)
        if fence and word.startswith(fence) and not word.strip(fence[0]):
            fence = ""
        elif not fence and word.startswith(("```", "~~~")):
            fence = word[: len(word) - len(word.lstrip(word[0]))]
        block.is_open = bool(fence) or is_table
        was_blank = not word
    if block.text:
        yield block


def _widgets(line: str, word: str, is_code: bool, is_table: bool) -> float:
    """Estimate how many widgets a line becomes; wrapping and parsing count as the widgets that take as long."""
    size = len(line) / CHARACTERS_OF_WIDGET
    if is_code:
        return size + 1 / LINES_OF_WIDGET
    if is_table:
        return size + max(word.count("|") - 1, 1)
    marks = _MARKS.match(line)
    assert marks is not None
    depth = len(marks[0].replace(">", "> ").split())
    indent = len(line) - len(line.lstrip(" "))
    if len(line) > LONGEST_LINE or depth + indent // 2 > DEEPEST:
        return MOST_OF_BLOCK + 1
    laid_out = depth * (depth + 1) / 2  # each quote doubles the visits of a layout
    return size + max(sum(map(line.count, MARKS)) / MARKS_OF_WIDGET, laid_out, bool(word))


def lines(text: str) -> list[str]:
    """Split a text into lines with their newlines, at newlines only (``splitlines`` knows eight more separators)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
