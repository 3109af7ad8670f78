"""quest: reads the pages with the highest bounds for each token's own query, after two layers that read everything.

Paper: Quest (arXiv 2406.10774); rule and parameters as in the authors' program. Each full page has the element-wise
maximum M and minimum m of its keys; a query q gives it the score sum_d max(q_d M_d, q_d m_d), an upper bound of its
logits. A token reads the page that is being filled and the budget / page - 1 other pages with the highest scores.

Departures:
    * Pages have 32 tokens (the paper: 16), and a model with two layers reads only one of them in full.
    * A KV head chooses pages by its group's maximum score (as FreeKV does); the paper chooses per query head.
    * The page being filled is always read, as in the authors' kernels; in their evaluation it competes with the others.
    * The authors' minimum of three pages does not override a smaller budget.
    * Unread pages are in the host pool; the paper keeps everything on the device.

Shapes: tables ``[layers, H, k * p + p]``, bounds ``[layers, H, page, 2 * d_k]``. Costs: a token scores all pages, and
each layer waits for chosen pages that the previous token did not read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvchat.config.modes import QuestParameters
from kvchat.kv.modes.base import ModeReport
from kvchat.kv.modes.comparison.page_choice import PageChoice
from kvchat.kv.modes.page_index import PageBounds


class Quest(PageChoice):
    """Chooses pages by Quest's bound."""

    parameters: QuestParameters
    index: PageBounds

    def _set_up(self) -> None:
        self.whole_layers = self.parameters.whole_layers
        super()._set_up()

    def _new_index(self, device: torch.device) -> PageBounds:
        return PageBounds(self.geometry, device, self.first)

    def scores(self, layer: int, query: Tensor, masked: Tensor) -> Tensor:
        bounds = self.index.scores(self.state.ops, layer, query, self.state.scaling(layer))
        return bounds.amax(1).masked_fill(masked, -torch.inf)

    def report(self) -> ModeReport:
        report = super().report()
        return replace(report, params=report.params | {"whole_layers": self.first})
