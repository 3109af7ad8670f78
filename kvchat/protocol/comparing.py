"""Messages of a comparison of modes, besides those of the conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from kvchat.protocol.figures import Count, Params, Run, Several

MAX_VARIANTS = 8
MAX_NEEDLE_TOKENS = 10_000_000


@dataclass(frozen=True)
class Variant:
    """A mode with parameters that count before those of the settings."""

    mode: str
    params: Params = field(default_factory=dict)


@dataclass(frozen=True)
class HideNeedle:
    """Make a conversation of about ``tokens`` tokens that asks for a fact told early; ``NeedleHidden`` brings it."""

    tokens: Annotated[int, Field(ge=1, le=MAX_NEEDLE_TOKENS)]
    seed: Count


@dataclass(frozen=True)
class Comparing:
    """``text`` of ``tokens`` tokens is what the variant ``index`` has answered so far.

    ``checked`` counts the first answer's tokens that it has been given since, to compare what it makes of each.
    """

    index: Count
    text: str
    tokens: Count
    checked: Count = 0


@dataclass(frozen=True)
class Compared:
    """The comparison is over: a run for each variant, in order; fewer where it was stopped."""

    runs: Several[Run]
    prompt_tokens: Count = 0
