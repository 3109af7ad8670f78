"""The lines of live switches, and where they stand in the text of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_PUNCTUATION = 8  # looked at between a word and the place of a switch
LINE = re.compile(r"── [^─\n]+ ──")
_WORD_END = re.compile(r"[^\W_][.,;:!?…\"'”’)\]]*(?=\s)|[、。，！？；：]")
_FENCE = re.compile(r"[ \t]*(```|~~~)")


def with_lines(text: str, lines: Sequence[tuple[int, str]], is_over: bool) -> str:
    """``text`` with each line behind the word that was being said at its place, a number of characters.

    While the text goes on a line waits for the end of that word: what is drawn stays as it is.
    """
    searched, end = f"{text}\n" if is_over else text, ""
    for place, line in reversed(lines):
        behind = _word_end(searched, place)
        if behind is not None:
            text = f"{text[:behind]} {line}{text[behind:]}"
        elif is_over:
            end = f"\n\n{line}{end}"
    return text + end


def _word_end(text: str, place: int) -> int | None:
    """The end of a word at ``place`` or behind it, in no line that begins or ends code."""
    for found in _WORD_END.finditer(text, max(place - MOST_PUNCTUATION, 0)):
        if found.end() >= place and not _FENCE.match(text, text.rfind("\n", 0, found.start()) + 1):
            return found.end()
    return None
