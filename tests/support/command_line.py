"""The command line in this process: what a person who types a command gets."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple


class Terminal(io.TextIOWrapper):
    """Stdin of somebody at a keyboard who types nothing."""

    def isatty(self) -> bool:
        return True


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
