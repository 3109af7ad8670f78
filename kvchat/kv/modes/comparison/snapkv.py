"""snapkv: reads the tokens that a prompt's last tokens attend to.

Paper: SnapKV (arXiv 2404.14469); parameters as in the authors' program. The last w tokens of a prompt vote: an earlier
token's score is the sum of their queries' softmax weights for it, averaged over 5 neighboring tokens. Each KV head
keeps the window and the budget - w tokens with the highest scores. Decoded tokens are kept too, beyond the budget.

Departures:
    * Every prompt chooses again, from all stored tokens: SnapKV per turn. The paper drops tokens for good.
    * The scores are averaged over a group's query heads. The paper's models have groups of one; its program votes per
      query head.
    * Only known queries vote, at most w: those of tokens that were processed for this prompt, not those of a prefix
      that was stored before. If an earlier question is answered again, a conversation was reopened, or no query is
      known, only the last token votes ("observed" says how many did).
    * It saves no memory (``kept``).

As remembered, the paper's runs take the maximum over neighbors; its program's default is the average.

Shapes: tables ``[layers, H, n]``. Costs: for each prompt, w softmaxes over all tokens in each layer, whose weights are
in memory together (512 MiB for 32 query heads and 131,072 tokens, in addition to that layer's K/V), and that layer's
scores. A token reads as many slots as in full mode, most of them masked.
"""

from __future__ import annotations

from torch import Tensor

from kvchat.config.modes import SnapKVParameters
from kvchat.kv.modes.comparison.kept import ObservedMode, pooled


class SnapKV(ObservedMode):
    """Keeps tokens by the sum of the last queries' weights."""

    parameters: SnapKVParameters

    def _set_up(self) -> None:
        self.window = self.parameters.window
        super()._set_up()

    def scores(self, layer: int, weights: Tensor) -> Tensor:
        return pooled(weights.sum(2)).mean(1)
