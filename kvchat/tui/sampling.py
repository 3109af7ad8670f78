"""Changing one sampling parameter by name, as typed by a person."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvchat.config.schema import checked_sampling
from kvchat.errors import UsageError, did_you_mean
from kvchat.protocol.messages import Sampling

NAMES = tuple(field.name for field in dataclasses.fields(Sampling))


def change(sampling: Sampling, key: str, value: str) -> Sampling:
    """``sampling`` with one parameter changed; ``none`` clears the seed, the stop strings and the temperature,
    which is the model's own then.

    Raises:
        UsageError: an unknown name or a value out of range.
    """
    if key not in NAMES:
        raise UsageError(f'There is no sampling parameter "{key}".', did_you_mean(key, NAMES))
    return checked_sampling(sampling, **{key: _value(sampling, key, value)})


def describe(sampling: Sampling) -> str:
    """The values that differ from the defaults, on one line."""
    default = Sampling()
    changed = [
        f"{name} {getattr(sampling, name)}" for name in NAMES if getattr(sampling, name) != getattr(default, name)
    ]
    return " · ".join(changed) or "defaults"


def _value(sampling: Sampling, key: str, text: str) -> Any:
    """A stop string is added to those there are; ``\\n`` in it is a newline."""
    if key == "stop":
        return () if text.lower() == "none" else (*sampling.stop, text.replace("\\n", "\n"))
    return None if key in ("seed", "temperature") and text.lower() in ("none", "auto") else text
