"""Live switches of the mode in an answer: a small mark in its text where each was, and what it was below it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvchat.protocol.figures import Count

MARK = "┃"  # as in the ribbon
DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
MARKED = re.compile(f"{MARK}[⁰¹²³⁴⁵⁶⁷⁸⁹]*(?=\\s|$)")
MOST_PUNCTUATION = 8  # looked at between a word and the place of a switch
_WORD_END = re.compile(r"[^\W_][.,;:!?…\"'”’)\]]*(?=\s)|[、。，！？；：]")
_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[^\n]*", re.MULTILINE)


@dataclass(frozen=True)
class ModeChange:
    """A live switch behind ``chars`` characters of an answer, at ``position`` stored tokens; ``line`` says what it was.

    ``mode`` is the one entered, "" where only its parameters changed.
    """

    chars: Count
    line: str
    position: Count = 0
    mode: str = ""


def marks(changes: Sequence[ModeChange]) -> list[str]:
    """The mark of each switch: numbered where there are several."""
    return [MARK + (str(number).translate(DIGITS) if len(changes) > 1 else "") for number in range(1, len(changes) + 1)]


def notes(changes: Sequence[ModeChange]) -> list[str]:
    """What each switch was, behind its mark."""
    return [f"{mark} {change.line}" for mark, change in zip(marks(changes), changes, strict=True)]


def with_marks(text: str, changes: Sequence[ModeChange], is_over: bool) -> str:
    """``text`` with a mark behind the word that was being said at each switch, in no code; before and after it none.

    While the text goes on a mark waits for the end of that word: what is drawn stays as it is.
    """
    searched, end = f"{text}\n" if is_over else text, len(text)
    for mark, change in reversed([*zip(marks(changes), changes, strict=True)]):
        behind = _word_end(searched, change.chars) if 0 < change.chars < end else None
        if behind is not None:
            text = f"{text[:behind]} {mark}{text[behind:]}"
    return text


def _word_end(text: str, place: int) -> int | None:
    """The end of the word at ``place`` or of the next one, outside of code."""
    outside = _code_end(text, place)
    while outside is not None:
        words = _WORD_END.finditer(text, max(outside - MOST_PUNCTUATION, 0))
        end = next((found.end() for found in words if found.end() >= outside), None)
        if end is None or (outside := _code_end(text, end)) == end:
            return end
    return None


def _code_end(text: str, place: int) -> int | None:
    """The end of the fenced code that ``place`` is in, ``place`` where it is in none; None where the code goes on."""
    opened = ""
    for fence in _FENCE.finditer(text):
        if not opened:
            if fence.start() > place:
                return place
            opened = fence[1]
        elif fence[1].startswith(opened):
            if fence.end() >= place:
                return fence.end()
            opened = ""
    return None if opened else place
