"""The line of a live switch, and where it stands in the text of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvchat.protocol.messages import Switched
from kvchat.tui.state import describe_switch

SETTLED_TOKENS = 64
TIMED_S = 0.2  # text that waited comes all at once: over less time no speed can be told from it
MOST_PUNCTUATION = 8  # looked at between a word and the place of a switch
LINE = re.compile(r"── [^─\n]+ ──")
_WORD_END = re.compile(r"[^\W_][.,;:!?…\"'”’)\]]*(?=\s)|[、。，！？；：]")
_FENCE = re.compile(r"[ \t]*(```|~~~)")


class SwitchLine:
    """``── full -> speculative · 14,203 tok · 41 -> 58 tok/s ──``; the second figure comes later.

    ``speed`` before the switch and that after it are of tokens of one mode each, in tokens/s.
    """

    def __init__(self, switched: Switched, speed: float | None) -> None:
        self.switched = switched
        self.speed = speed
        self.settled = False
        self._after: float | None = None
        self._tokens = 0
        self._begun: float | None = None

    @property
    def line(self) -> str:
        """The line as far as it is known."""
        return f"── {describe_switch(self.switched, self.speed, self._after)} ──"

    @property
    def is_idle(self) -> bool:
        """True if no token has come after the switch."""
        return self._begun is None

    def count(self, tokens: int, now: float) -> None:
        """Count tokens after the switch; ``now`` in seconds. The speed is final after ``SETTLED_TOKENS``."""
        if self.settled:
            return
        if self._begun is None:
            self._begun = now
            return
        self._tokens += tokens
        if self._tokens >= SETTLED_TOKENS:
            self.close(now)

    def close(self, now: float) -> None:
        """Show the speed of the tokens so far, if they are enough to tell one; those of another answer tell none."""
        if self.settled or self._begun is None:
            return
        self.settled = True
        if self._tokens and now - self._begun >= TIMED_S:
            self._after = self._tokens / (now - self._begun)
            self.show_line()

    def show_line(self) -> None:
        """Show the line with its second figure."""
        raise NotImplementedError


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
