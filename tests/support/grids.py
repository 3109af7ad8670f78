"""Thinned grids of parameters; the long form takes every cell.

``KVCHAT_TEST_GRIDS=all python -m pytest -n auto tests/kv`` is the long form; ``.ci/long`` runs those of its
cells that are heads of today's models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

WHOLE = "KVCHAT_TEST_GRIDS" in os.environ


def sampled(rows: Iterable[Any], others: Sequence[Any], each: int = 1) -> list[tuple[Any, Any]]:
    """Pairs of every row with ``each`` of the others, taken in turn: with enough rows, every other occurs."""
    if WHOLE:
        return list(product(rows, others))
    return [(row, others[(i * each + j) % len(others)]) for i, row in enumerate(rows) for j in range(each)]


def pairwise(rows: Sequence[Any], columns: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Triples in which every row meets every column, and both of them meet every one of the others.

    There must be at least as many rows and columns as others.
    """
    if WHOLE:
        return list(product(rows, columns, others))
    cells = product(enumerate(rows), enumerate(columns))
    return [(row, column, others[(i + j) % len(others)]) for (i, row), (j, column) in cells]
