"""One finding of ``kvchat doctor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvchat.units import MISSING


@dataclass(frozen=True)
class Check:
    """A finding, its state, and advice unless it is ok; a ``problem`` keeps kvchat from running."""

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def guarded(name: str, read: Callable[[], Check]) -> Check:
    """Return the check, or a warning if it raises."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # whatever a library or a driver raises, the report goes on
        lines = str(error).splitlines() or [""]
        return Check(name, "warning", MISSING, f"It could not be read: {type(error).__name__}: {lines[0]}")
