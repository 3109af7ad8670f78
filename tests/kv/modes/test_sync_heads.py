"""Clusters of KV heads and who represents them."""

from __future__ import annotations

import pytest
import torch

from kvchat.kv.modes.sync_heads import Calibration, default_clusters, kmeans, roles


def calibration(similarity, retrieval) -> Calibration:
    return Calibration("r", "a text", 2, (similarity,), (retrieval,))


# Heads 0, 3 and 5 are alike, and 1, 2 and 4; 3 and 2 lie in the middle of theirs.
PAIRS = {(0, 3): 0.9, (3, 5): 0.9, (0, 5): 0.8, (1, 2): 0.85, (2, 4): 0.85, (1, 4): 0.7}
SIMILARITY = tuple(tuple(1.0 if a == b else PAIRS.get((min(a, b), max(a, b)), 0.1) for b in range(6)) for a in range(6))
RETRIEVAL = (0.1, 0.0, 0.2, 0.0, 0.6, 0.3)


def test_the_best_retriever_of_each_cluster_represents_it():
    (layer,) = roles(calibration(SIMILARITY, RETRIEVAL), 2, "retrieval")
    assert layer.representatives == (5, 4)
    assert dict(zip(layer.followers, layer.follows, strict=True)) == {0: 0, 1: 1, 2: 1, 3: 0}


def test_the_papers_rule_takes_the_head_in_the_middle():
    (layer,) = roles(calibration(SIMILARITY, RETRIEVAL), 2, "centroid")
    assert layer.representatives == (3, 2)


def test_one_cluster_has_one_representative_for_all():
    (layer,) = roles(calibration(SIMILARITY, RETRIEVAL), 1, "retrieval")
    assert layer.representatives == (4,)
    assert layer.follows == (0,) * 5


def test_as_many_clusters_as_heads_leave_no_follower():
    (layer,) = roles(calibration(SIMILARITY, RETRIEVAL), 6, "retrieval")
    assert sorted(layer.representatives) == list(range(6))
    assert layer.followers == ()


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_finds_separate_clouds_and_numbers_them_by_their_first_member(seed):
    centers = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, 9.0]], dtype=torch.float64)
    noise = torch.randn(30, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels, found = kmeans(centers.repeat(10, 1) + 0.3 * noise, 3, seed)
    assert labels.tolist() == [0, 1, 2] * 10
    torch.testing.assert_close(found, centers, atol=0.5, rtol=0)


def test_kmeans_gives_the_same_answer_twice():
    points = torch.rand(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(kmeans(points, 4)[0], kmeans(points, 4)[0])


@pytest.mark.parametrize("clusters", [1, 2, 5, 8])
def test_no_cluster_is_empty_even_where_points_coincide(clusters):
    points = torch.zeros(8, 3, dtype=torch.float64)
    points[6:] = 1
    labels, _ = kmeans(points, clusters)
    assert labels.unique().tolist() == list(range(clusters))


@pytest.mark.parametrize(("heads", "clusters"), [(1, 1), (2, 1), (4, 1), (8, 2), (32, 8)])
def test_a_quarter_of_the_heads_represents(heads, clusters):
    assert default_clusters(heads, "llama") == clusters


def test_one_head_represents_in_qwen_as_in_the_paper():
    """Qwen2.5-14B has 8 KV heads (audit, 7)."""
    assert default_clusters(8, "qwen2") == default_clusters(2, "qwen2") == 1
