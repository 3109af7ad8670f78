"""Changing one sampling parameter by name, as typed by a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvchat.errors import UsageError, did_you_mean
from kvchat.protocol.messages import Sampling

NAMES = tuple(field.name for field in dataclasses.fields(Sampling))
Check = Callable[[Any], bool]
NUMBERS: dict[str, tuple[type, Check, str]] = {
    "temperature": (float, lambda x: 0 <= x <= 10, "a number from 0 (greedy) to 10"),
    "top_k": (int, lambda x: x >= 0, "a whole number; 0 is off"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0, up to 1 (off)"),
    "min_p": (float, lambda x: 0 <= x <= 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (float, lambda x: x > 0, "a number above 0; 1 is off"),
    "seed": (int, lambda x: x >= 0, "a whole number, or none"),
    "max_new_tokens": (int, lambda x: x >= 1, "a whole number of at least 1"),
}


def change(sampling: Sampling, key: str, value: str) -> Sampling:
    """``sampling`` with one parameter changed; ``none`` clears the seed and the stop strings.

    Raises:
        UsageError: an unknown name or a value out of range.
    """
    if key not in NAMES:
        raise UsageError(f'There is no sampling parameter "{key}".', did_you_mean(key, NAMES))
    return dataclasses.replace(sampling, **{key: _value(sampling, key, value)})


def describe(sampling: Sampling) -> str:
    """What differs from the defaults, on one line."""
    default = Sampling()
    changed = [
        f"{name} {getattr(sampling, name)}" for name in NAMES if getattr(sampling, name) != getattr(default, name)
    ]
    return " · ".join(changed) or "defaults"


def _value(sampling: Sampling, key: str, text: str) -> Any:
    """A stop string is added to those there are; ``\\n`` in it is a newline."""
    if key == "stop":
        return () if text.lower() == "none" else (*sampling.stop, text.replace("\\n", "\n"))
    return None if key == "seed" and text.lower() == "none" else _number(key, text)


def _number(key: str, text: str) -> float | int:
    kind, allowed, words = NUMBERS[key]
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not allowed(value):
        raise UsageError(f'{key} "{text}" is refused.', f"It takes {words}.")
    return value  # type: ignore[no-any-return]
