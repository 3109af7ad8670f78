"""Relevance of tokens to the one being decoded (ASR-KF-EGR, Eq. 2, and the scores that ``freeze`` offers beside it)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, Weights


class Scores:
    """Relevance of the tokens in ``table [n]`` (-1 empty) to one token, gathered layer by layer.

    ``kind`` is a parameter of the freeze mode; of ``prob_rel`` the first ``sink`` tokens have no share.
    """

    def __init__(self, kind: str, sink: int, table: Tensor) -> None:
        self.kind = kind
        self.table = table
        self.sum = torch.zeros(len(table), device=table.device)
        self.layers = 0
        self.windowed: Tensor | int = 0
        self._counted = (table >= sink).float()
        self._number = self._counted.sum()

    def add_shares(self, weights: Weights, spec: AttentionSpec, position: Tensor) -> None:
        """Count a layer by its weights."""
        seen = self._seen(spec, position)
        number = self._number if seen is None else (self._counted * seen).sum()
        weights.add_shares(self.sum, self._counted, number)

    def add_products(self, query: Tensor, keys: Tensor, spec: AttentionSpec, position: Tensor) -> None:
        """Count a layer by ``query [q_heads, d_k]`` and ``keys [H, n, d_k]``, but for a score that takes nothing."""
        if self.kind == "always":
            return
        seen = self._seen(spec, position)
        grouped = query.view(len(keys), -1, query.shape[-1])
        products = torch.bmm(grouped, keys.transpose(1, 2)).float().abs().mean((0, 1))
        self.sum += products if seen is None else products * seen

    def _seen(self, spec: AttentionSpec, position: Tensor) -> Tensor | None:
        """The tokens that the layer sees, which counts for them; float32 ``[n]``, None for all."""
        if spec.window is None:
            self.layers += 1
            return None
        seen = (self.table > position - spec.window).float()
        self.windowed = self.windowed + seen
        return seen

    def result(self) -> Tensor:
        """``[n]``, the mean over the layers; 0 for a token that no layer can see."""
        layers = self.layers + self.windowed
        return self.sum / (layers.clamp(min=1) if isinstance(layers, Tensor) else max(1, layers))
