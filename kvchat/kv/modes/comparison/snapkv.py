"""snapkv: the tokens that a prompt's last tokens attend to.

Paper: SnapKV (arXiv 2404.14469); parameters as in the authors' program. The last w tokens of a prompt vote: the score
of a token before them is the sum of their queries' weights for it, in a softmax over all, averaged with its neighbors'
(5 tokens). Each KV head keeps the budget - w tokens of highest score and the window. Tokens decoded after that are kept
too, beyond the budget.

Departures:
    * Every prompt chooses again, from everything stored: SnapKV per turn. The paper drops for good.
    * The scores are averaged over a group's query heads; the paper's models have groups of one, its program votes by
      query head.
    * Only known queries vote, at most w: those of tokens that were processed for this prompt, not of a prefix that was
      stored before. If an earlier question is answered again or a conversation was reopened, only the last token votes
      ("observed" says how many did). So it does if no query is known.
    * It saves no memory (``kept``).

As remembered, the paper's runs take the maximum of neighbors; its program's default is the average.

Shapes: tables ``[layers, H, n]``. Costs: for each prompt w softmaxes over all tokens in each layer, whose weights are
in memory together (512 MiB for 32 query heads and 131,072 tokens, in addition to that layer's K/V), and that layer's
scores; a token reads as many slots as in full mode, most of them masked.
"""

from __future__ import annotations

from torch import Tensor

from kvchat.config.modes import SnapKVParameters
from kvchat.kv.modes.comparison.kept import ObservedMode, pooled


class SnapKV(ObservedMode):
    """Tokens by the sum of the last queries' weights."""

    parameters: SnapKVParameters

    def _set_up(self) -> None:
        self.window = self.parameters.window
        super()._set_up()

    def scores(self, layer: int, weights: Tensor) -> Tensor:
        return pooled(weights.sum(2)).mean(1)
