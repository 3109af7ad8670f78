"""Relevance of tokens to the one being decoded (ASR-KF-EGR, Eq. 2, and the scores that ``freeze`` offers beside it)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.config.modes import FreezeParameters
from kvchat.kv.attention import Weights
from kvchat.kv.attention_spec import AttentionSpec

WEIGHED = ("prob_max", "prob_rel")  # the scores that are made of attention's weights


class Scores:
    """Relevance of the tokens in ``table [n]`` (-1 empty) to one token, gathered layer by layer."""

    def __init__(self, rule: FreezeParameters, table: Tensor) -> None:
        self.kind = rule.score
        self.table = table
        self.sum = torch.zeros(len(table), device=table.device)
        self.highest = torch.zeros_like(self.sum)
        self.layers = 0
        self.windowed: Tensor | int = 0
        self._counted = (table >= rule.sink).float()
        self._number = self._counted.sum()

    def add(self, weights: Weights | None, query: Tensor, keys: Tensor, spec: AttentionSpec, position: Tensor) -> None:
        """One layer's weights, where the score is made of them, ``query [H, G, d_k]`` and ``keys [H, n, d_k]``."""
        if self.kind == "always":
            return
        seen = None if spec.window is None else (self.table > position - spec.window).float()
        if seen is None:
            self.layers += 1
        else:
            self.windowed = self.windowed + seen
        if weights is not None and self.kind in WEIGHED:
            number = self._number if seen is None else (self._counted * seen).sum()
            if self.kind == "prob_max":
                self.highest = torch.maximum(self.highest, weights.best().amax(0) * number)
            else:
                weights.add_shares(self.sum, self._counted, number)
        else:
            scale = spec.scaling if self.kind == "scaled" else 1.0
            products = torch.bmm(query, keys.transpose(1, 2)).float().abs().mean((0, 1)) * scale
            self.sum += products if seen is None else products * seen

    def result(self) -> Tensor:
        """``[n]``, the highest or the mean over the layers; 0 for a token that no layer can see."""
        if self.kind == "prob_max":
            return self.highest
        layers = self.layers + self.windowed
        return self.sum / (layers.clamp(min=1) if isinstance(layers, Tensor) else max(1, layers))
