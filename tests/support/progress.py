"""Progress that nobody sees."""

from __future__ import annotations


def silent(stage: str) -> None:
    """Ignore a stage."""
