"""Agreement of a model's head clusters between texts that they were measured on (SyncKV, appendix B.1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvchat.bench.texts import BOOKS
from kvchat.engine.calibration import calibrate, file_samples
from kvchat.errors import UsageError
from kvchat.kv.modes.sync_heads import RULES, Calibration, kmeans, roles
from kvchat.models.load import LoadedModel


def corpora(model: LoadedModel, texts: int) -> dict[str, Calibration]:
    """A calibration on the first ``texts`` texts of each shipped book, by the book's name.

    Raises:
        UsageError: the model has too few heads to compare clusters of.
    """
    if model.kv_heads < 3:
        raise UsageError(
            "Two heads make no clusters.",
            f"A layer of {model.name} has {model.kv_heads} KV heads.",
            "Take a model with more KV heads.",
        )
    books = sorted(BOOKS.glob("*.txt"))
    return {book.stem: calibrate(model, file_samples(model, [book])[:texts], book.stem) for book in books}


def concordance(measured: Mapping[str, Calibration], clusters: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """For every two corpora: shares of heads in the same cluster, and of the same representatives by each rule."""
    for one, other in itertools.combinations(measured, 2):
        pair = measured[one], measured[other]
        labels = [[_labels(layer, clusters) for layer in each.similarity] for each in pair]
        same = [matching(a, b) for a, b in zip(*labels, strict=True)]
        figures: dict[str, Any] = {"same cluster": sum(same) / len(same)}
        for rule in RULES:
            led = [[set(layer.representatives) for layer in roles(each, clusters, rule)] for each in pair]
            shared = [len(a & b) / clusters for a, b in zip(*led, strict=True)]
            figures[f"same representatives, {rule}"] = sum(shared) / len(shared)
        yield f"N_r={clusters}: {one} and {other}", figures


def matching(one: Sequence[int], other: Sequence[int]) -> float:
    """The share of heads in the same cluster of two clusterings, under the numbering that makes most of them so."""
    names = range(max(*one, *other) + 1)
    best = max(
        sum(renamed[a] == b for a, b in zip(one, other, strict=True)) for renamed in itertools.permutations(names)
    )
    return best / len(one)


def _labels(similarity: Sequence[Sequence[float]], clusters: int) -> list[int]:
    scores: Tensor = torch.tensor(similarity, dtype=torch.float64)
    found: list[int] = kmeans(scores.max() - scores, clusters)[0].tolist()
    return found
