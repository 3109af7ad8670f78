"""Progress that is ignored."""

from __future__ import annotations


def silent(stage: str) -> None:
    """Ignore a stage."""
