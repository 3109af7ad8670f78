"""Measurements of a model: clusters of similar KV heads (SyncKV, section 4.1), and how many tokens attention needs.

The rows of D = max(S) - S are clustered with k-means (the paper, appendix B.1). k-means is implemented here, because
scikit-learn would add scipy and joblib to every installation for a few dozen points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

HEADS_PER_CLUSTER = 4
STARTS = 20


@dataclass(frozen=True)
class TokenChoice:
    """Speculative mode's default parameters for a model, and the share of attention that they cover.

    ``measured_on`` describes the text of the measurement; None for ``sink`` and ``window`` leaves them to the mode.
    """

    measured_on: str
    covered: float
    budget: int
    index: str = "bits2"
    sink: int | None = None
    window: int | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The mode's parameters that were measured."""
        named = {"budget": self.budget, "index": self.index, "sink": self.sink, "window": self.window}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Calibration:
    """Measurements of a model. ``clusters`` is the default number of representatives per layer.

    ``similarity [layer][head][head]`` is the mean overlap coefficient of the heads' most attended tokens,
    ``retrieval [layer][head]`` the attention mass on the source of tokens that are being repeated. ``measured_on``
    describes the text of both measurements. ``choice`` is None if only the heads were measured.
    """

    revision: str
    measured_on: str
    clusters: int
    similarity: tuple[tuple[tuple[float, ...], ...], ...]
    retrieval: tuple[tuple[float, ...], ...]
    choice: TokenChoice | None = None


@dataclass(frozen=True)
class Roles:
    """One layer's KV heads: follower i follows ``representatives[follows[i]]``."""

    representatives: tuple[int, ...]
    followers: tuple[int, ...]
    follows: tuple[int, ...]


def default_clusters(kv_heads: int, architecture: str = "") -> int:
    """Return the paper's number of representatives per layer: 1 for every Qwen, otherwise a quarter of the heads."""
    return 1 if architecture.startswith("qwen") else max(1, kv_heads // HEADS_PER_CLUSTER)


def roles(calibration: Calibration, clusters: int, rule: str) -> list[Roles]:
    """Return every layer's representatives and followers.

    With ``rule`` "retrieval", the head with the highest retrieval score represents its cluster; with "centroid" (the
    paper's rule), the head nearest to the centroid.
    """
    return [
        _layer_roles(similarity, retrieval, clusters, rule)
        for similarity, retrieval in zip(calibration.similarity, calibration.retrieval, strict=True)
    ]


def kmeans(points: Tensor, clusters: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return labels ``[n]`` and centroids ``[clusters, d]`` of ``points [n, d]``: the best of 20 starts, none empty.

    The same points and seed give the same result; clusters are numbered by their first member.
    """
    generator = torch.Generator().manual_seed(seed)
    runs = [_lloyd(points, _first_centroids(points, clusters, generator)) for _ in range(STARTS)]
    _, labels = min(runs, key=lambda run: run[0])
    order = sorted(range(clusters), key=lambda c: int((labels == c).nonzero()[0]))
    labels = torch.tensor([order.index(c) for c in labels.tolist()])
    return labels, _centroids(points, labels, clusters)


# Without the cache, each entry into the mode would take milliseconds per layer. It has room for two large models.
@lru_cache(maxsize=256)
def _layer_roles(
    similarity: tuple[tuple[float, ...], ...], retrieval: tuple[float, ...], clusters: int, rule: str
) -> Roles:
    alike = torch.tensor(similarity, dtype=torch.float64)
    distance = alike.max() - alike
    labels, centroids = kmeans(distance, clusters)
    representatives = []
    for c in range(clusters):
        members = (labels == c).nonzero().flatten().tolist()
        if rule == "retrieval":
            representatives.append(max(members, key=lambda h: retrieval[h]))
        else:
            away = (distance - centroids[c]).norm(dim=1)
            representatives.append(min(members, key=lambda h: float(away[h])))
    followers = tuple(h for h in range(len(labels)) if h not in representatives)
    return Roles(tuple(representatives), followers, tuple(int(labels[h]) for h in followers))


def _first_centroids(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Choose centroids by k-means++: each is drawn in proportion to its squared distance to those drawn before."""
    drawn = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(drawn) < clusters:
        weights = torch.cdist(points, points[drawn]).amin(1).square()
        weights[drawn] = 0
        # Points that coincide with drawn ones have no weight; any of them can be drawn if no others are left.
        weights = weights + torch.finfo(points.dtype).tiny
        weights[drawn] = 0
        drawn.append(int(torch.multinomial(weights / weights.sum(), 1, generator=generator)))
    return points[drawn]


def _lloyd(points: Tensor, centroids: Tensor) -> tuple[float, Tensor]:
    """Return inertia and labels once nothing changes any more."""
    labels = torch.full((len(points),), -1)
    while True:
        away = torch.cdist(points, centroids)
        nearest = _none_empty(away, away.argmin(1))
        if torch.equal(nearest, labels):
            return float(away.gather(1, labels[:, None]).square().sum()), labels
        labels = nearest
        centroids = _centroids(points, labels, len(centroids))


def _none_empty(away: Tensor, labels: Tensor) -> Tensor:
    """Give each empty cluster the point farthest from its centroid, from a cluster with more than one."""
    for c in range(away.shape[1]):
        if not bool((labels == c).any()):
            counts = labels.bincount(minlength=away.shape[1])
            own = away.gather(1, labels[:, None])[:, 0].masked_fill(counts[labels] < 2, -1)
            labels = labels.clone()
            labels[int(own.argmax())] = c
    return labels


def _centroids(points: Tensor, labels: Tensor, clusters: int) -> Tensor:
    return torch.stack([points[labels == c].mean(0) for c in range(clusters)])
