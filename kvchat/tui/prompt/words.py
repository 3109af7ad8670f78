"""Words that need not be typed in full: a beginning that only one known word has stands for it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from kvchat.errors import UsageError, did_you_mean


def nearest(given: str, known: Iterable[str]) -> list[str]:
    """The few known words that are most like ``given``."""
    return get_close_matches(given, list(known), n=3, cutoff=0.5)


def resolve(given: str, known: Iterable[str], kind: str) -> str:
    """The known word that ``given`` is or begins; of ``mode`` and ``model`` the one that begins the other.

    Raises:
        UsageError: no known word begins so, or several do; ``kind`` says what is looked for.
    """
    words = list(known)
    exact = [word for word in words if word == given] or [word for word in words if word.lower() == given.lower()]
    found = exact or sorted((word for word in words if word.lower().startswith(given.lower())), key=len)
    if not found or not given:
        raise UsageError(f'There is no {kind} "{given}".', did_you_mean(given.lower(), words))
    if not all(word.startswith(found[0]) for word in found):
        raise UsageError(f'"{given}" is the beginning of several: {", ".join(sorted(found))}.', hint="Type more of it.")
    return found[0]
