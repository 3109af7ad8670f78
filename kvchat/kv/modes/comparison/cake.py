"""cake: SnapKV with other scores, and with larger budgets for layers whose attention is spread out and shifts.

Paper: CAKE (ICLR 2025); formulas as in the authors' program, except for its rounding. A [w, n] are the weights of a
prompt's last w queries over the n tokens before them. For a layer, over all heads: H = -sum A ln A, V = the sum over
tokens of the variance over queries; its preference is H^(1/tau1) V^(1/tau2). Layers share (budget - w) tokens per layer
in proportion to their preferences. None gets more than n; the others share the remainder equally. A KV head keeps the
tokens with the highest mean A + gamma var A, averaged over 5 neighboring tokens and over the group.

Departures:
    * Those of snapkv, so decoded tokens are kept. In the paper the number of tokens that a layer keeps stays the same;
      the current query's weights choose them.
    * tau1 and tau2 are 1; the program has a pair for each of its models, from 0.4 to 2.3.
    * gamma is 200, the paper's value as remembered.
    * If only one query is known, variances are 0 and layers get equal budgets.
    * All budgets are set at the end of the prompt; the paper sets them layer by layer, with the same result.

Shapes and costs: as snapkv.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvchat.config.modes import CakeParameters
from kvchat.kv.modes.comparison.kept import pooled
from kvchat.kv.modes.comparison.snapkv import SnapKV

TINY = 1e-10  # added to a weight before taking its logarithm


class Cake(SnapKV):
    """SnapKV's window with other scores and a budget per layer."""

    parameters: CakeParameters

    def _set_up(self) -> None:
        super()._set_up()
        self.preferences = [0.0] * self.geometry.layers

    def scores(self, layer: int, weights: Tensor) -> Tensor:
        p = self.parameters
        varies = weights.var(2) if weights.shape[2] > 1 else torch.zeros_like(weights[:, :, 0])
        spread = -float((weights * (weights + TINY).log()).sum())
        # In Python floats, because powers in float32 may be 0 or infinite.
        self.preferences[layer] = max(0.0, spread) ** (1 / p.tau1) * float(varies.sum()) ** (1 / p.tau2)
        return pooled(weights.mean(2) + p.gamma * varies).mean(1)

    def rooms(self, tokens: int) -> list[int]:
        return shared_out((self.budget - self.window) * self.geometry.layers, self.preferences, tokens)


def shared_out(total: int, preferences: Sequence[float], most: int) -> list[int]:
    """Divide ``total`` in proportion to ``preferences``, at most ``most`` each; the others share the rest equally."""
    whole = sum(preferences)
    shares = [preference / whole if whole else 1 / len(preferences) for preference in preferences]
    parts = [min(most, int(share * total)) for share in shares]
    while (left := total - sum(parts)) > 0 and (open_ := [i for i, part in enumerate(parts) if part < most]):
        for i in open_[:left]:
            parts[i] += 1
    return parts
