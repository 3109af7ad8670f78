"""snapkv: the tokens that a prompt's last tokens attend to.

Paper: SnapKV (arXiv 2404.14469); parameters as in the authors' program. The last w tokens of a prompt vote: a token
before them has the sum of the weights that their queries give it in a softmax over all, averaged with its neighbors'
(5 tokens), and each KV head keeps the budget - w tokens of highest score and the window. Whatever is decoded after
that is kept too, beyond the budget.

Departures:
    * It is chosen anew at every prompt, from everything stored: SnapKV per turn. The paper drops for good.
    * The scores are the mean over the query heads of a group; the paper's models have groups of one, its program votes
      by query head.
    * A prompt votes with the queries that are known of it, w at most: of one whose beginning was stored before, with
      those of what was read anew. An answer to an earlier question is begun again by its last token alone, and so is
      one in a conversation that was reopened ("observed" says by how many).
    * Where none is known the last token's votes.
    * The memory saved is not saved (``kept``).

The paper's runs are remembered to take the maximum of neighbors; its program's default is the average.

Shapes: tables ``[layers, H, n]``. Costs: once a prompt w softmaxes over all tokens in each layer, whose weights are
there at once (512 MiB for 32 query heads and 131,072 tokens, beside that layer's K/V), and what that layer's scores
take; a token reads as many slots as in full mode, most of them masked.
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
