"""What the database and exported files keep beside texts: figures, lines of switches, a mode's parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter

from kvchat.conversations.switch_lines import ModeChange
from kvchat.protocol.figures import Params, Several, Stats

_STATS = TypeAdapter(Stats)
_CHANGE = TypeAdapter(ModeChange)


def _change(given: object) -> object:
    """A switch from what JSON held; earlier versions kept its place and a line between dashes."""
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[1], str):
        given = {"chars": given[0], "line": given[1].strip("─ ")}
    return _CHANGE.validate_python(given)


SwitchLines = Several[Annotated[ModeChange, BeforeValidator(_change)]]
_SWITCH_LINES: TypeAdapter[SwitchLines] = TypeAdapter(SwitchLines)
_PARAMS: TypeAdapter[Params] = TypeAdapter(Params)
_NAMES = {field.name for field in dataclasses.fields(Stats)}


def read_stats(values: object) -> Stats | None:
    """Stats from what JSON held, also of another version: unknown figures are left out, all where one is damaged."""
    if not isinstance(values, dict):
        return None
    try:
        stats = _STATS.validate_python({name: value for name, value in values.items() if name in _NAMES})
    except (ValueError, RecursionError):
        return None
    return stats if all(math.isfinite(value) for value in vars(stats).values() if isinstance(value, float)) else None


def read_switch_lines(text: object) -> SwitchLines:
    """Live switches from JSON; none where it is damaged."""
    try:
        return _SWITCH_LINES.validate_json(text)  # type: ignore[arg-type]
    except ValueError:
        return ()


def read_params(text: object) -> Params:
    """A mode's parameters from JSON; none where it is damaged. The mode checks them when it is entered."""
    try:
        return _PARAMS.validate_json(text)  # type: ignore[arg-type]
    except ValueError:
        return {}
