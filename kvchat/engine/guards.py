"""What callers of the Python API may do wrong: use a closed session, give no number, fork, interleave answers."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from kvchat.errors import UsageError


class Released:
    """Lets go of what ``held`` names by ``release``; to use any of it afterwards raises ``UsageError``."""

    held: ClassVar[tuple[str, ...]] = ()

    def release(self) -> None:
        """Let go; may be called again."""
        for name in self.held:
            self.__dict__.pop(name, None)

    if not TYPE_CHECKING:  # a type checker would take every misspelled name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in self.held:
                raise UsageError("The session is closed.", "Its model is no longer in memory.", "Load it again.")
            raise AttributeError(f"{type(self).__name__} has no {name}")


class OneAtATime:
    """Only one answer or rebuild works on the stored tokens, in the process that loaded the model."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._working = threading.Lock()

    def check_process(self) -> None:
        """Refuse to work in a forked process: torch's threads are not there, and it would wait for them for ever.

        Raises:
            UsageError
        """
        if os.getpid() != self._process:
            raise UsageError(
                "A session cannot be used in a forked process.",
                f"It was loaded by process {self._process}; this is process {os.getpid()}.",
                "Load the model after forking, or start the process with the method spawn.",
            )

    def check_idle(self) -> None:
        """Refuse to work while an answer is in progress.

        Raises:
            UsageError
        """
        self.check_process()
        if self._working.locked():
            raise _busy()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Mark work as in progress inside the block.

        Raises:
            UsageError: something else is.
        """
        self.check_process()
        if not self._working.acquire(blocking=False):
            raise _busy()
        try:
            yield
        finally:
            self._working.release()


def whole(value: Any, name: str) -> int:
    """The whole number that ``value`` is: of Python, numpy or a tensor.

    Raises:
        UsageError: it is a fraction, a text, true or false, or anything else.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"{type(value).__name__} {value!r}"[:80]
        raise UsageError(f"{name} must be a whole number.", f"Given: {given}.", "Give an int.") from None


def _busy() -> UsageError:
    return UsageError(
        "An answer is in progress.",
        "A session does one thing at a time; between two tokens only switch and cancel may be called.",
        "Read the answer to its end, or close its generator.",
    )
