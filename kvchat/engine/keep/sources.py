"""Kept K/V that a conversation can be taken up from: parked in host memory or saved on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvchat.engine.generate.stored import Stored
from kvchat.kv.memory.kept_tokens import KeptTokens
from kvchat.kv.memory.page_file import PageFile, SavedState
from kvchat.models.recurrent import Snapshot

States = Mapping[int, Callable[[], Snapshot | None]]  # by the tokens they have read; None where one is damaged


@dataclass
class Source:
    """Kept K/V of a conversation that begins as the one to open; ``where`` it is: memory or disk.

    ``stored`` is all that is there, of which the ``kept`` tokens are of use. A hybrid model can go on only from one of
    its ``states``.
    """

    stored: Stored
    where: str
    kept: KeptTokens
    states: States


def itself(snapshot: Snapshot) -> Snapshot:
    """A parked recurrent state, which needs no reading."""
    return snapshot


def read_state(file: PageFile, saved: SavedState) -> Snapshot | None:
    """A recurrent state from a file; None where it is damaged."""
    data = file.state(saved)
    return Snapshot.decoded(saved.tokens, data) if data else None


def of_another(source: Source) -> Source:
    """Return ``source`` for another conversation, in whose file nothing of it is yet."""
    return replace(source, stored=replace(source.stored, saved=0))
