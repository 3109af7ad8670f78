"""Means, quantiles and intervals of what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NORMAL_95 = 1.959964  # standard deviations on both sides that hold 95 % of a normal distribution


def mean(values: Iterable[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of all do not exceed.

    None where fewer than one value lies beyond it: the 99.9 % quantile needs 1,000 values.
    """
    if not values or len(values) * min(share, 1 - share) < 1 - 1e-9:
        return None
    return sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]


def wilson(right: int, cases: int) -> tuple[float, float] | None:
    """The 95 % Wilson score interval of a share; None without cases."""
    if not cases:
        return None
    share, z2 = right / cases, NORMAL_95**2
    middle = (share + z2 / (2 * cases)) / (1 + z2 / cases)
    half = NORMAL_95 / (1 + z2 / cases) * math.sqrt(share * (1 - share) / cases + z2 / (4 * cases**2))
    return max(0.0, middle - half), min(1.0, middle + half)
