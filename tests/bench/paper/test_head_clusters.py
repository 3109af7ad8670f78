"""Clusterings of heads are compared by who is together, not by how clusters are numbered."""

from __future__ import annotations

import pytest

from kvchat.bench.paper.synckv import concordance, matching
from kvchat.kv.modes.sync_heads import Calibration


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [([0, 0, 1, 1], [1, 1, 0, 0], 1.0), ([0, 0, 1, 1], [0, 1, 1, 1], 0.75), ([0, 0, 0, 1], [0, 1, 2, 2], 0.5)],
)
def test_heads_match_under_the_best_numbering(one, other, share):
    assert matching(one, other) == share


def paired(*pairs):
    """One layer of four heads, of which those of a pair attend alike."""
    alike = [[1.0 if {i, j} in [set(pair) for pair in pairs] or i == j else 0.1 for j in range(4)] for i in range(4)]
    similarity = tuple(tuple(line) for line in alike)
    return Calibration("revision", "text", 2, (similarity,), ((0.9, 0.1, 0.2, 0.8),))


def test_figures_of_every_two_corpora():
    same, other = paired((0, 1), (2, 3)), paired((0, 2), (1, 3))
    found = dict(concordance({"a": same, "b": same, "c": other}, 2))
    assert list(found) == ["N_r=2: a and b", "N_r=2: a and c", "N_r=2: b and c"]
    assert found["N_r=2: a and b"]["same cluster"] == 1
    assert found["N_r=2: a and c"]["same cluster"] == 0.5
    assert found["N_r=2: a and b"]["same representatives, retrieval"] == 1
