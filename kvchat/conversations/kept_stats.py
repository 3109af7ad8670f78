"""The figures of an answer as the database and exported files keep them."""

from __future__ import annotations

import dataclasses
import math

from pydantic import TypeAdapter

from kvchat.protocol.figures import Stats

_STATS = TypeAdapter(Stats)
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
