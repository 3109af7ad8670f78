"""The line of a live switch while its figures come."""

from __future__ import annotations

from kvchat.protocol.messages import Switched
from kvchat.tui.state import describe_switch

SETTLED_TOKENS = 64
TIMED_S = 0.2  # text that waited comes all at once: over less time no speed can be told from it


class SwitchLine:
    """``full -> speculative · 14,203 tok · 41 -> 58 tok/s``; the second figure comes later.

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
        return describe_switch(self.switched, self.speed, self._after)

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
