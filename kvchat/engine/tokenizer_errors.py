"""Errors of the tokenizers library, which come with a model: its regular expressions may fail at a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvchat.errors import ModelError


def guarded(tokenizer: Any) -> Any:
    """Return ``tokenizer``, whose calls, ``encode`` and ``decode`` raise ``ModelError`` where the library panics."""
    kind = type(tokenizer)

    class Guarded(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with explained_panics():
                return super().__call__(*args, **kwargs)

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            with explained_panics():
                return super().encode(*args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            with explained_panics():
                return super().decode(*args, **kwargs)

    Guarded.__name__, Guarded.__qualname__, Guarded.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    tokenizer.__class__ = Guarded
    return tokenizer


@contextmanager
def explained_panics() -> Iterator[None]:
    """Say that a tokenizer gave up.

    Raises:
        ModelError: instead of the library's panic, which is no ``Exception``.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ModelError(
            "The model's tokenizer fails at this text.",
            f"Its message: {str(error)[:300]}.",
            "Write it in other words, or choose another model.",
        ) from None
