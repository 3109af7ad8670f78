"""pyramidkv: SnapKV with a smaller budget for each higher layer.

Paper: PyramidKV (arXiv 2406.02069); budgets and parameters as in the authors' program. Tokens are scored as in snapkv.
With b = budget - w tokens per layer on average, the last layer keeps b / beta tokens and the first 2 b - b / beta, with
equal steps between them, each in addition to the window. If the first would keep more than the n tokens that exist, it
keeps n, and the last 2 b - n. Prompts with fewer than 2 b tokens are treated as in snapkv.

Departures: those of snapkv. The authors' scripts use a window of 8 and the maximum of 7 neighbors.

Shapes and costs: as snapkv.
"""

from __future__ import annotations

from kvchat.config.modes import PyramidKVParameters
from kvchat.kv.modes.comparison.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV with budgets that shrink from layer to layer."""

    parameters: PyramidKVParameters

    def rooms(self, tokens: int) -> list[int]:
        layers, average = self.geometry.layers, self.budget - self.window
        if tokens + self.window < 2 * average or layers == 1:
            return super().rooms(tokens)
        first = min(2 * average - average // self.parameters.beta, tokens)
        step = (first - (2 * average - first)) // (layers - 1)
        return [first - layer * step for layer in range(layers)]
