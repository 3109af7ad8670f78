"""Quantiles and intervals against known values."""

from __future__ import annotations

import pytest

from kvchat.bench.frame import mean, quantile, wilson


@pytest.mark.parametrize(
    ("right", "cases", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (8, 10, 0.4902, 0.9433), (1, 1, 0.2065, 1.0), (40, 40, 0.9124, 1.0)],
)
def test_wilson_intervals_are_those_of_the_tables(right, cases, low, high):
    assert wilson(right, cases) == pytest.approx((low, high), abs=1e-4)


def test_nothing_has_neither_mean_nor_interval():
    assert (mean([]), wilson(0, 0), quantile([], 0.5)) == (None, None, None)


def test_a_quantile_that_the_count_does_not_carry_is_missing():
    values = [float(i) for i in range(1, 1001)]
    assert quantile(values, 0.5) == 500
    assert quantile(values, 0.99) == 990
    assert quantile(values, 0.999) == 999
    assert quantile(values[:999], 0.999) is None
    assert quantile(values[:99], 0.99) is None
