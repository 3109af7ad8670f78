"""Tokens of a conversation whose K/V are kept outside the host pool: parked in host memory, or saved in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvchat.kv.memory.host_pool import HostPool


@dataclass(frozen=True)
class KeptTokens:
    """The first ``tokens`` of a conversation, as another session or an earlier moment of this one stored them.

    ``read`` puts the pages of so many tokens into an empty host pool and returns how many of them are whole;
    the first ``exact`` tokens lie in pages before those that are or were 8-bit ones. ``control`` are the positions of
    control tokens, ``query`` is the last token's in bytes, empty if unknown.
    """

    tokens: int
    read: Callable[[HostPool, int], int]
    exact: int
    control: Sequence[int]
    query: bytes = b""

    @property
    def rounded(self) -> bool:
        """True if some of the tokens are in pages that are or were 8-bit ones."""
        return self.exact < self.tokens

    def beginning(self, tokens: int) -> KeptTokens:
        """The first ``tokens`` of them."""
        control = [position for position in self.control if position < tokens]
        return replace(self, tokens=tokens, control=control, query=self.query if tokens == self.tokens else b"")
