"""Weights of a model that nobody has."""

from __future__ import annotations

from typing import Any

from kvchat.models.weights import LINEAR, Part, Weights


def linears(elements: int, dtype: str = "bfloat16", nbytes: int = 0, **fields: Any) -> Weights:
    """So many elements of square matrices."""
    size = 4096
    return Weights(nbytes or 2 * elements, dtype, {Part(LINEAR, size, size): elements // size**2}, **fields)
