"""What an application that ended in mid-answer had not saved, by the ledger of the fake engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvchat.tui.controller import CHECKPOINT_S

BUSY_S = 0.5  # how late a machine with other work saves; a quiet one loses less than a second
MOST_S = 2 * CHECKPOINT_S + BUSY_S  # of its speech that may be lost
WORDS = "the window moves and older pages rest on the host "  # of the question ``slow``, again and again


@dataclass(frozen=True)
class Loss:
    """What the engine had said when something was killed, and is not on disk; ``seconds`` of its speech."""

    characters: int
    seconds: float


def loss(ledger: Path, killed: float, kept: int) -> Loss:
    """What was said until ``killed`` behind the ``kept`` first characters."""
    lost, first = 0, killed
    for line in ledger.read_text().splitlines():
        when, characters = map(float, line.split())
        kept -= int(characters)
        if kept < 0 and when <= killed:
            lost, first = lost + int(characters), min(first, when)
    return Loss(lost, killed - first)
