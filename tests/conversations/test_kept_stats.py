"""Figures of answers, read from what other versions or a damaged file kept."""

from __future__ import annotations

import math

import pytest

from kvchat.conversations.conversation import read_stats
from kvchat.protocol.figures import Stats


def test_unknown_figures_are_left_out():
    kept = {"generated_tokens": 3, "decode_tokens_per_s": 7.5, "of_a_later_version": 1}
    assert read_stats(kept) == Stats(generated_tokens=3, decode_tokens_per_s=7.5)


@pytest.mark.parametrize(
    "damaged", [None, [], {"generated_tokens": "many"}, {"decode_tokens_per_s": math.nan}, {"read_share": math.inf}]
)
def test_damaged_ones_are_none(damaged):
    assert read_stats(damaged) is None
