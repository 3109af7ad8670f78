"""The text that an application killed in mid-answer had not saved, by the ledger of the fake engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvchat.tui.controller import CHECKPOINT_S

BUSY_S = 0.5  # how late a busy machine saves; an idle one loses less than a second
MAX_LOSS_S = 2 * CHECKPOINT_S + BUSY_S  # of the answer that may be lost
WORDS = "the window moves and older pages rest on the host "  # of the answer to ``slow``, repeated


@dataclass(frozen=True)
class Loss:
    """The text sent before the kill that is not on disk; ``seconds`` is the time from its first word to the kill."""

    characters: int
    seconds: float


def loss(ledger: Path, killed: float, kept: int) -> Loss:
    """The loss at the time ``killed``, if the first ``kept`` characters are on disk."""
    lost, first = 0, killed
    for line in ledger.read_text().splitlines():
        when, characters = map(float, line.split())
        kept -= int(characters)
        if kept < 0 and when <= killed:
            lost, first = lost + int(characters), min(first, when)
    return Loss(lost, killed - first)
