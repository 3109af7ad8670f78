"""Stand-ins for what messages say: a conversation rendered with them has no control tokens but the template's own."""

from __future__ import annotations

import re
from itertools import accumulate, count

EDGE = "\ufdd2"  # a Unicode noncharacter, which never occurs in real text and has no case
_STAND_IN = re.compile(f"{EDGE}([0-9]+){EDGE}")
THOUGHT_END = "</think>"
_THOUGHT_BEGIN = re.compile(r"^\s*(?:<think>\s*)?")
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
    """Marks before and after what each message of one conversation says, in twice the number of its place.

    One more, in the next number, where its thought begins.
    """

    def __init__(self) -> None:
        self._numbers = count(0, 2)

    def put(self, content: str) -> str:
        """``content`` with its marks, inside white space and what templates look for: they leave that out."""
        number = next(self._numbers)
        thought, end, said = content.rpartition(THOUGHT_END)
        begun = thought[: len(thought) - len(_THOUGHT_BEGIN.sub("", thought, count=1))]
        if thought != begun:
            thought = f"{begun}{EDGE}{number + 1}{EDGE}{thought.removeprefix(begun)}"
        first, last = _inner(said)
        mark = f"{EDGE}{number}{EDGE}"
        return f"{thought}{end}{said[:first]}{mark}{said[first:last]}{mark}{said[last:]}"


def _inner(said: str) -> tuple[int, int]:
    """Where the words of a text begin and end that no template looks for; all of its words where it has no others."""
    others = [found.span() for found in _LOOKED_FOR.finditer(said)]
    gaps = zip([0, *(end for _, end in others)], [*(begin for begin, _ in others), len(said)], strict=True)
    words = [gap for gap in gaps if said[slice(*gap)].strip()] or [(0, len(said))]
    begin, end = words[0][0], words[-1][1]
    inner = said[begin:end]
    return begin + len(inner) - len(inner.lstrip()), end - (len(inner) - len(inner.rstrip()) if inner.strip() else 0)


def found_edges(rendered: str) -> tuple[str, list[tuple[int, int, int]]] | None:
    """A text rendered with ``Edges`` without them, and what it says: number of a message, first character and end.

    Messages come as the text has them: in any order, more than once, not at all. None where marks are not in pairs.
    """
    parts = _STAND_IN.split(rendered)
    marks = zip(map(int, parts[1::2]), accumulate(map(len, parts[::2])), strict=False)
    said: list[tuple[int, int, int]] = []
    thought = begun = None
    for number, place in marks:
        if number % 2:
            thought = (number - 1, place)
        elif begun is None:
            begun = thought if thought and thought[0] == number else (number, place)
        elif begun[0] == number:
            said.append((number // 2, begun[1], place))
            thought = begun = None
        else:
            return None
    return None if begun else ("".join(parts[::2]), said)


def harmless(rendered: str) -> str:
    """``rendered`` with a letter for each text."""
    return _STAND_IN.sub("x", rendered)
