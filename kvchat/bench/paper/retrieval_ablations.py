"""FreeKV with one decision of FreeKV replaced: how the scores of a group are pooled, whose query retrieves.

No mode that a person can choose: the parameters are not in the registry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.ops.selection import Candidates
from kvchat.kv.state import KVState

Pooling = Literal["MeanS", "MaxS", "MeanQK", "MaxQK"]
Source = Literal["own", "layer below"]


class AblatedParameters(SpeculativeParameters):
    """Of ``SpeculativeParameters``; the source "layer below" is asked at every step, so that it needs a tau above 1."""

    implementation: ClassVar[str] = "kvchat.bench.paper.retrieval_ablations:Ablated"

    @property
    def implemented_by(self) -> str:
        return self.implementation

    pooling: Pooling = "MeanS"
    """how a KV head's query heads agree on pages: mean or maximum of their weights (S) or of their scores (QK)"""
    source: Source = "own"
    """the query that retrieves: the layer's own, or at the same step that of the layer below"""


def _max_of_weights(scores: Tensor, candidates: Candidates) -> Tensor:
    # Logarithms keep the order of the weights through the softmax that follows.
    return scores.float().masked_fill(candidates.masked, float("-inf")).log_softmax(-1).amax(1, keepdim=True)


# Scores [H, G, page] pooled to [H, 1, page]: the softmax of one row that follows keeps their order.
POOLED: dict[Pooling, Callable[[Tensor, Candidates], Tensor]] = {
    "MeanS": lambda scores, candidates: scores,
    "MaxS": _max_of_weights,
    "MeanQK": lambda scores, candidates: scores.float().mean(1, keepdim=True),
    "MaxQK": lambda scores, candidates: scores.amax(1, keepdim=True),
}


class Ablated(FreeKV):
    """FreeKV with the pooling and the source of its parameters."""

    parameters: AblatedParameters

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self._below = state.query[0]

    def attention_begin(self, layer: int, query: Tensor, key: Tensor, spec: AttentionSpec) -> bool:
        below, self._below = self._below, query
        asked = below if self.parameters.source == "layer below" and layer else query
        return super().attention_begin(layer, asked, key, spec)

    def choose(self, layer: int, scores: Tensor, candidates: Candidates, flagged: Tensor | None = None) -> Tensor:
        return super().choose(layer, POOLED[self.parameters.pooling](scores, candidates), candidates, flagged)
