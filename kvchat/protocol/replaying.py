"""Messages of a recording, besides those of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

MAX_PACE = 64.0


@dataclass(frozen=True)
class Pace:
    """Play a recording so many times as fast as it was recorded; 0 pauses. Other engines do nothing."""

    speed: Annotated[float, Field(ge=0, le=MAX_PACE)]


@dataclass(frozen=True)
class Asked:
    """Of a recording: this was asked, and what follows is the answer. The application sends it as its own question."""

    text: str


@dataclass(frozen=True)
class Replayed:
    """The recording, ``seconds`` long, is over."""

    seconds: float
