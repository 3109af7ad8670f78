"""In which parts an answer is drawn: as Markdown, few widgets each, and as plain text.

Textual makes a widget of every paragraph, list item and table cell, each costs a millisecond or two when it is new, and
each layout visits all of them: as one Markdown a table of 150 x 60 blocks the screen for 20 s. So Markdown comes in
parts that are mounted one after the other, for so many widgets in all; the rest is plain text.

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
ENOUGH_OF_PART = 20  # a part ends at the next line where one may begin ...
ENOUGH_FOR_GAP = 25  # ... or where it may begin with a larger gap above: headings, fences and quotes have a margin
WIDGETS_OF_TABLE = 2  # around its cells
WIDGETS_OF_FENCE = 3  # around its code; one of them scrolls
LINES_OF_WIDGET = 8  # of code: one widget, but highlighted whole
CHARACTERS_OF_WIDGET = 800
MARKS = "*_~`<>&[]{}!\\$%+-:=@^#"  # where the parser stops in a line
MARKS_OF_WIDGET = 50
LONGEST_LINE = 3000  # of opened brackets or addresses, which models repeat without end, it is parsed for 0.3 s
DEEPEST = 10  # items and quotes in each other; what is nested deeper than ``MOST_NESTED`` the parser drops
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
    """A part of an answer's text."""

    text: str
    is_markdown: bool

    @property
    def begins_with_item(self) -> bool:
        """A list begins the part, perhaps one that the part before began."""
        return self.is_markdown and bool(_ANYWHERE.match(self.text))


@dataclass
class _Block:
    """A line, a whole fence or a whole table; ``widgets`` is about how many it becomes.

    It begins a part where the one before has ``begins_at`` widgets. ``is_open``: the next line may belong to it.
    """

    text: str
    widgets: float
    begins_at: float = 0
    is_open: bool = False


def parts(text: str) -> list[Part]:
    """``text`` in parts, all but the last of which stay the same when more text follows.

    A fence, table or line that would make too many widgets is plain from its beginning on, and Markdown goes on after
    it; where all others made too many the rest is plain.
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
    """The lines that say where reference links lead, ``[1]: https://...``, for all parts; not those in code."""
    if not _DEFINITION.search(text):
        return ""
    # One that is none is parsed as text, and costs as much.
    found = (_DEFINITION.match(block.text) for block in _blocks(text) if block.widgets < MOST_OF_DEFINITION)
    return "\n".join([match[0] for match in found if match][:MOST_DEFINITIONS])


def closed_end(text: str, inside_line: bool) -> int:
    """Index up to which ``text`` may be parsed; a fence or table still open at its end is behind it.

    So is the last line while it may yet begin a fence, an item or a heading. ``inside_line``: it goes on with a line.
    """
    begun = len(lines(text)[0]) if text and inside_line else 0
    *_, last = [_Block("", 0), *_blocks(text[begun:])]
    waits = last.is_open or _BEGINNING.fullmatch(last.text.strip(" "))
    return len(text) - len(last.text) if waits else len(text)


def _blocks(text: str) -> Iterator[_Block]:
    """The text line by line, but fences and tables whole; the last one may go on."""
    block, fence, was_blank = _Block("", 0), "", True
    for line in lines(text):
        word = line.strip()
        is_table = word.startswith("|") and not fence
        goes_on = bool(fence) or (is_table and block.text.lstrip().startswith("|"))
        if not goes_on:
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
    """About how many widgets a line becomes, or are made in the time that it is wrapped and its marks are parsed."""
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
    laid_out = depth * (depth + 1) / 2  # in a quote layouts visit all twice
    return size + max(sum(map(line.count, MARKS)) / MARKS_OF_WIDGET, laid_out, bool(word))


def lines(text: str) -> list[str]:
    """Lines with their newline, split at newlines only (``splitlines`` knows eight more separators)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
