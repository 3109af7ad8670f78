"""What a message must give. Its wording is free: a test holds it to names, figures, paths and commands."""

from __future__ import annotations


def lacks(message: object, *facts: str) -> list[str]:
    """The facts that a message does not give."""
    return [fact for fact in facts if fact not in str(message)]
