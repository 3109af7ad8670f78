"""Stand-ins for what messages say: a conversation rendered with them has no control tokens but the template's own."""

from __future__ import annotations

import re

EDGE = "\ufdd2"  # a Unicode noncharacter, which never occurs in real text and has no case
_STAND_IN = re.compile(f"{EDGE}([0-9]+){EDGE}")
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


def harmless(rendered: str) -> str:
    """``rendered`` with a letter for each text."""
    return _STAND_IN.sub("x", rendered)
