"""Guards against misuse of the Python API: a closed session, no number, a fork, answers or calls at once."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvchat.errors import UsageError

T = TypeVar("T")
_loaded_by: list[int] = []  # the process that loaded the first model; its forks inherit it


class Released:
    """Lets go of what ``_held`` names by ``_release``; to use any of it afterwards raises ``UsageError``."""

    _held: ClassVar[tuple[str, ...]] = ()

    def _release(self) -> None:
        """Let go; may be called again."""
        for name in self._held:
            self.__dict__.pop(name, None)

    if not TYPE_CHECKING:  # a type checker would take every misspelled name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in self._held:
                raise _closed()
            raise AttributeError(f"{type(self).__name__} has no {name}")


class SessionLock:
    """Only one answer or rebuild works on the stored tokens, in the process that loaded the model.

    Whatever changes what is stored or read does so inside ``with``: a thread is there alone, and may enter again.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._working = threading.Lock()
        self._inside = threading.RLock()
        self._is_closed = False

    def __enter__(self) -> None:
        """Let no other thread in until the block ends.

        Raises:
            UsageError: another is inside, or this process is a fork.
        """
        self.check_process()
        if not self._inside.acquire(blocking=False):
            raise _at_once()

    def __exit__(self, *_: object) -> None:
        self._inside.release()

    def close(self) -> None:
        """Let nothing go on that is in progress."""
        self._is_closed = True

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that loaded the model, which has the same files open."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse to work in a forked process: torch's threads are not there, and it would wait for them for ever.

        Raises:
            UsageError
        """
        if self.is_forked:
            raise UsageError(
                "A session cannot be used in a forked process.",
                f"It was loaded by process {self._process}; this is process {os.getpid()}.",
                "Start the process with the method spawn, and load the model there.",
            )

    def check_idle(self) -> None:
        """Refuse to work while an answer is in progress.

        Raises:
            UsageError
        """
        with self:
            if self._working.locked():
                raise _busy()

    def in_turn(self, events: Generator[T, None, None]) -> Iterator[T]:
        """The events of something long, which is in progress until they end or are closed.

        Between two of them, and only there, another thread may be inside.

        Raises:
            UsageError: something else is in progress, or another thread is inside when the next event is asked for;
                then they end. So they do after ``close`` and in a forked process.
        """
        with self._in_progress():
            with self:
                event = next(events, None)
            try:
                while event is not None:
                    yield event
                    with self:
                        if self._is_closed:
                            raise _closed()
                        event = next(events, None)
            finally:
                # What is put back at the end waits for whoever is inside; in a fork nobody would ever come out.
                with nullcontext() if self.is_forked else self._inside:
                    events.close()

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        self.check_process()
        if not self._working.acquire(blocking=False):
            raise _busy()
        try:
            yield
        finally:
            self._working.release()


def check_loading() -> None:
    """Refuse to load a model in a fork of a process that loaded one, as ``SessionLock.check_process``.

    Raises:
        UsageError
    """
    _loaded_by[:] = _loaded_by or [os.getpid()]
    if os.getpid() not in _loaded_by:
        raise UsageError(
            "No model can be loaded in this process.",
            f"It is a fork of process {_loaded_by[0]}, which loaded one.",
            "Start it with the method spawn.",
        )


def whole_number(value: Any, name: str) -> int:
    """The whole number that ``value`` is: of Python, numpy or a tensor.

    Raises:
        UsageError: it is a fraction, a text, true or false, too long to be written, or anything else.
    """
    kind = type(value).__name__
    try:
        if str(getattr(value, "dtype", kind)).endswith("bool"):
            raise TypeError
        number = operator.index(value)
        str(number)  # messages name it; Python writes at most 4,300 digits
    except (TypeError, ValueError, RuntimeError):
        with suppress(ValueError):
            kind += f" {value!r}"
        raise UsageError(f"{name} must be a whole number.", f"Given: {kind[:80]}.", "Give an int.") from None
    return number


def function(value: Any, name: str) -> Any:
    """``value``, which can be called.

    Raises:
        UsageError: it cannot.
    """
    if not callable(value):
        raise UsageError(f"{name} must be a function.", f"Given: {value!r}."[:200], "Give one, or leave it out.")
    return value


def kind_of(value: T, kind: type[Any], expected: str) -> T:
    """``value``, which is of a ``kind`` that an error calls ``expected``.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(value, kind):
        raise UsageError(f"This is not {expected}.", f"Given: {value!r}."[:200], f"Give {expected}.")
    return value


def token_ids(values: Any) -> list[int]:
    """The token ids that anything gives one after another.

    Raises:
        UsageError: it gives none, or what is no whole number.
    """
    with suppress(TypeError):  # also numpy's and torch's single numbers, which have __iter__ and refuse
        if ids := [whole_number(token, "A token id") for token in iter(values)]:
            return ids
    raise UsageError("There is nothing to prefill.", "No ids were given.", "Give at least one token id.")


def _closed() -> UsageError:
    return UsageError("The session is closed.", "Its model is no longer in memory.", "Load it again.")


def _at_once() -> UsageError:
    return UsageError(
        "Another thread is using the session.",
        "A session is for one thread at a time; only cancel may be called from any thread at any moment.",
        "Call it from one thread, or hold a lock while you do.",
    )


def _busy() -> UsageError:
    return UsageError(
        "An answer is in progress.",
        "A session does one thing at a time; between two tokens only switch and cancel may be called.",
        "Read the answer to its end, or close its generator.",
    )
