"""pyramidkv: SnapKV with less for every layer than for the one before it.

Paper: PyramidKV (arXiv 2406.02069); budgets and parameters as in the authors' program. Tokens are scored as in snapkv.
With b = budget - w tokens for a layer on average, the last layer keeps b / beta and the first 2 b less that, in equal
steps, each beside the window; where the first would keep more than there are it keeps all, and the last 2 b less
those. Prompts of less than 2 b tokens are as in snapkv.

Departures: those of snapkv. The authors' scripts take a window of 8 and the maximum of 7 neighbors.

Shapes and costs: as snapkv.
"""

from __future__ import annotations

from kvchat.config.modes import PyramidKVParameters
from kvchat.kv.modes.comparison.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV with a pyramid of budgets."""

    parameters: PyramidKVParameters

    def rooms(self, tokens: int) -> list[int]:
        layers, average = self.geometry.layers, self.budget - self.window
        if tokens + self.window < 2 * average or layers == 1:
            return super().rooms(tokens)
        first = min(2 * average - average // self.parameters.beta, tokens)
        step = (first - (2 * average - first)) // (layers - 1)
        return [first - layer * step for layer in range(layers)]
