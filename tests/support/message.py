"""What a message must contain. Its wording is free: tests check names, figures, paths and commands."""

from __future__ import annotations


def lacks(message: object, *facts: str) -> list[str]:
    """The facts that a message does not contain."""
    return [fact for fact in facts if fact not in str(message)]
