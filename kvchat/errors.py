"""Every error that kvchat shows to a user.

KvchatError                 anything safe to show: a title, details, what to do
├── UsageError              wrong flags, prompt or settings                     exit code 2
│   ├── ModelError          the model cannot be found, read or supported        exit code 2
│   └── TooMuchPinnedError  pinned tokens leave a mode too little room          exit code 2
├── DoesNotFitError         context, budget or memory is too small; has numbers exit code 3
│   ├── ContextFullError    longer than the model's context                     exit code 3
│   └── OutOfMemoryError    memory ran out during work                          exit code 3
└── EngineError             the engine failed while working                     exit code 1
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

ENDS = (".", "?", "!", ":", "…", '."')  # of a sentence; messages of other programs may lack one
MANY = 20  # known words to list in a message: all parameters or key ids would fill the screen
INSTEAD = "/model loads a model on this machine, where modes switch live."  # the hint if a server runs the model


class KvchatError(Exception):
    """Base of all errors that are shown to a user.

    ``title`` is one sentence, ``detail`` the cause with its numbers, ``hint`` what to do. ``str(error)`` joins them.
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
    """Pinned tokens leave a mode too little room."""


class DoesNotFitError(KvchatError):
    """Context, budget or memory is too small; the message has the numbers."""

    exit_code = 3


class ContextFullError(DoesNotFitError):
    """A conversation of ``tokens`` tokens (0 if not counted) is longer than the model's context."""

    def __init__(self, title: str, detail: str = "", hint: str = "", tokens: int = 0) -> None:
        super().__init__(title, detail, hint)
        self.tokens = tokens


class OutOfMemoryError(DoesNotFitError):
    """Memory ran out during work; tokens stored before are kept."""


class EngineError(KvchatError):
    """The engine failed while working."""


def nearest(given: str, known: Iterable[str]) -> str:
    """Return the only known word that contains ``given``, else the most similar one, or "" if none is similar."""
    words, given = {word.lower(): word for word in known}, given.lower()
    containing = [word for word in words if given and given in word]
    near = containing if len(containing) == 1 else difflib.get_close_matches(given, words, n=1)
    return words[near[0]] if near else ""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Suggest the nearest known word, and list all if there is none near or there are at most ``MANY``."""
    words = sorted(known)
    near, listed = nearest(str(given), words), f"Known: {', '.join(words) or 'none'}."
    if not near:
        return listed
    return f'Did you mean "{near}"?' + (f" {listed}" if len(words) <= MANY else "")


def check_known(given: str, known: Collection[str], kind: str) -> None:
    """Raise UsageError unless ``given`` is among ``known``; ``kind`` is what the words name."""
    if given not in known:
        raise UsageError(f'There is no {kind} "{given[:200]}".', did_you_mean(given, known))


def resolve(given: str, known: Iterable[str], kind: str) -> str:
    """Return the known word that is or begins with ``given``; of several, one that begins all others (mode, model).

    Raises:
        UsageError: no known word begins with ``given``, or several do; ``kind`` is what the words name.
    """
    words = list(known)
    exact = [word for word in words if word == given] or [word for word in words if word.lower() == given.lower()]
    found = exact or sorted((word for word in words if word.lower().startswith(given.lower())), key=len)
    if not found or not given:
        raise UsageError(f'There is no {kind} "{given}".', did_you_mean(given, words))
    if not all(word.startswith(found[0]) for word in found):
        raise UsageError(f'"{given}" is ambiguous: {", ".join(sorted(found))}.', hint="Type more of it.")
    return found[0]
