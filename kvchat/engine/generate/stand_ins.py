"""Stand-ins for what messages say: a conversation rendered with them has no control tokens but the template's own."""

from __future__ import annotations

import re
from itertools import accumulate, count

EDGE = "\ufdd2"  # a Unicode noncharacter, which never occurs in real text and has no case
_STAND_IN = re.compile(f"{EDGE}([0-9]+){EDGE}")
THOUGHT_END = "</think>"
# What templates look for in messages, to write other turns: it stays, and what is before and after it is apart.
_LOOKED_FOR = re.compile("(</?(?:think|tool_response)>|/(?:no_?)?think|detailed thinking (?:on|off))")


class StandIns:
    """Stand-ins for the texts of one conversation, and the texts."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def put(self, content: str) -> str:
        """``content`` in stand-ins; the white space around each stays, which templates trim."""
        pieces = _LOOKED_FOR.split(content)
        return "".join(piece if number % 2 else self._stand_in(piece) for number, piece in enumerate(pieces))

    def put_back(self, rendered: str) -> str | None:
        """``rendered`` with the texts; None where one follows the other at once: together they may spell anything."""
        return None if EDGE * 2 in rendered else _STAND_IN.sub(lambda found: self._texts[int(found[1])], rendered)

    def _stand_in(self, text: str) -> str:
        if not (said := text.strip()):
            return text
        self._texts.append(said)
        before, _, after = text.partition(said)
        return f"{before}{EDGE}{len(self._texts) - 1}{EDGE}{after}"


class Edges:
    """Marks before and after what each message of one conversation says, numbered in their order."""

    def __init__(self) -> None:
        self._numbers = count()

    def put(self, content: str) -> str:
        """``content`` with its marks: inside white space and after a thought, which templates leave out."""
        mark = f"{EDGE}{next(self._numbers)}{EDGE}"
        thought, end, said = content.rpartition(THOUGHT_END)
        said_only = said.strip()
        before, _, after = said.partition(said_only) if said_only else (said, "", "")
        return f"{thought}{end}{before}{mark}{said_only}{mark}{after}"


def found_edges(rendered: str) -> tuple[str, list[tuple[int, int, int]]] | None:
    """A text rendered with ``Edges`` without them, and what it says: number of a message, first character and end.

    Messages come as the text has them: in any order, more than once, not at all. None where marks are not in pairs.
    """
    parts = _STAND_IN.split(rendered)
    places = list(accumulate(map(len, parts[::2])))
    begins, ends = parts[1::4], parts[3::4]
    if begins != ends:
        return None
    return "".join(parts[::2]), list(zip(map(int, begins), places[::2], places[1::2], strict=False))


def harmless(rendered: str) -> str:
    """``rendered`` with a letter for each text."""
    return _STAND_IN.sub("x", rendered)
