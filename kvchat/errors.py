"""Every error kvchat shows to a person.

KvchatError                 anything safe to show: a title, what was given, what to do
├── UsageError              wrong flags, prompt or settings                     exit code 2
│   ├── ModelError          the model cannot be found, read or supported        exit code 2
│   └── TooMuchPinnedError  a mode would keep little beside what is pinned      exit code 2
├── DoesNotFitError         context, budget or memory is too small; has numbers exit code 3
│   ├── ContextFullError    longer than the model's context                     exit code 3
│   └── OutOfMemoryError    memory ran out in the middle of work                exit code 3
└── EngineError             the engine failed while working                     exit code 1
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

ENDS = (".", "?", "!", ":", "…", '."')  # of a sentence; what others say may have none
MANY = 20  # words in a refusal: all parameters or ids of keys fill the screen
INSTEAD = "/model loads a model on this machine, where modes switch live."  # of what a server decides


class KvchatError(Exception):
    """Base of all errors that may be shown as they are.

    ``title`` is one human sentence; ``detail`` says what was given and why it is refused; ``hint``
    says what to do. ``str(error)`` joins them.
    """

    exit_code = 1

    def __init__(self, title: str, detail: str = "", hint: str = "") -> None:
        super().__init__(title, detail, hint)
        self.title = title
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        *before, last = [part for part in (self.title, self.detail, self.hint) if part] or [""]
        return " ".join([*(part if part.endswith(ENDS) else f"{part}." for part in before), last])


class UsageError(KvchatError):
    """Wrong flags, prompt or settings."""

    exit_code = 2


class ModelError(UsageError):
    """The model cannot be found, read or supported."""


class TooMuchPinnedError(UsageError):
    """A mode would have too little room beside what is pinned."""


class DoesNotFitError(KvchatError):
    """Context, budget or memory is too small for what was asked; the message carries the numbers."""

    exit_code = 3


class ContextFullError(DoesNotFitError):
    """A conversation is longer than the model's context: ``tokens``, 0 where they were not counted."""

    def __init__(self, title: str, detail: str = "", hint: str = "", tokens: int = 0) -> None:
        super().__init__(title, detail, hint)
        self.tokens = tokens


class OutOfMemoryError(DoesNotFitError):
    """Memory ran out in the middle of work; what was stored before is kept."""


class EngineError(KvchatError):
    """The engine failed while working."""


def nearest(given: str, known: Iterable[str]) -> str:
    """The one known word that ``given`` is a part of, else the one most like it; empty if none is near."""
    words, given = {word.lower(): word for word in known}, given.lower()
    having = [word for word in words if given and given in word]
    near = having if len(having) == 1 else difflib.get_close_matches(given, words, n=1)
    return words[near[0]] if near else ""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A sentence naming the known words, and the nearest one where there is one; beside it not more than ``MANY``."""
    words = sorted(known)
    near, listed = nearest(str(given), words), f"Known: {', '.join(words)}."
    if not near:
        return listed
    return f'Did you mean "{near}"?' + (f" {listed}" if len(words) <= MANY else "")


def check_known(given: str, known: Collection[str], kind: str) -> None:
    """Refuse what is not ``known``, by UsageError; ``kind`` says what is looked for."""
    if given not in known:
        raise UsageError(f'There is no {kind} "{given[:200]}".', did_you_mean(given, known))


def resolve(given: str, known: Iterable[str], kind: str) -> str:
    """The known word that ``given`` is or begins; of ``mode`` and ``model`` the one that begins the other.

    Raises:
        UsageError: no known word begins so, or several do; ``kind`` says what is looked for.
    """
    words = list(known)
    exact = [word for word in words if word == given] or [word for word in words if word.lower() == given.lower()]
    found = exact or sorted((word for word in words if word.lower().startswith(given.lower())), key=len)
    if not found or not given:
        raise UsageError(f'There is no {kind} "{given}".', did_you_mean(given, words))
    if not all(word.startswith(found[0]) for word in found):
        raise UsageError(f'"{given}" is ambiguous: {", ".join(sorted(found))}.', hint="Type more of it.")
    return found[0]
