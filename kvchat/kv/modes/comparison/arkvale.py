"""arkvale: reads all pages on the device, and evicts those with the lowest scores.

Paper: ArkVale (NeurIPS 2024); rule and parameters as in the authors' program. A full page's digest is a box around its
keys: its center c is half the sum of their element-wise maximum and minimum, its half-width r_d the mean of
|c_d - k_d|. A page's score is sum_d max(q_d (c + r)_d, q_d (c - r)_d), summed over all heads, so that a layer has one
choice. Two pages of sinks and the two newest pages are always resident. After a prompt, its last query chooses the k
best others, which fill the budget. Each token then makes the best k / 2 resident, in place of the worst, and reads all
resident pages.

Departures:
    * No readable source says how the heads' scores are combined; this mode sums them.
    * Half means half of the pages without sinks and newest ones; the program takes half of the budget, minus those.
    * A page that is no longer among the newest stays resident until it is the worst, like a recalled page.
    * Recall for a later layer by an earlier layer's query (an option of the program, off by default) is left out.

Shapes: tables ``[layers, H, k * p + 4 * p]``, digests ``[layers, H, page, 2 * d_k]``. Costs: as quest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.modes.comparison.page_choice import PageChoice, tiles
from kvchat.kv.modes.page_index import PageBounds
from kvchat.kv.ops.selection import best, mask_of

SINK_PAGES = 2
NEWEST_PAGES = 2
SHARE = 2  # each token chooses one in 2 of the resident pages


class PageBoxes(PageBounds):
    """Digests in the form of bounds: ``[c + r | r - c]``."""

    def summary(self, keys: Tensor, pages: int) -> Tensor:
        by_page = tiles(keys, pages, self.geometry.page)
        center = (by_page.amax(2) + by_page.amin(2)) / 2
        width = (center.unsqueeze(2) - by_page).abs().mean(2)
        return torch.cat((center + width, width - center), -1).to(self.dtype)


class ArkVale(PageChoice):
    """Chooses pages by the score of their boxes, for all heads of a layer together, and evicts the worst first."""

    sink_pages = SINK_PAGES
    newest_pages = NEWEST_PAGES
    index: PageBoxes

    def _new_index(self, device: torch.device) -> PageBoxes:
        return PageBoxes(self.geometry, device, self.first)

    def fill(self, fresh: bool) -> None:
        self.slots.pages.fill_(-1)  # only the prompt's last query decides which pages are resident
        super().fill(fresh)

    def scores(self, layer: int, query: Tensor, masked: Tensor) -> Tensor:
        of_heads = self.index.scores(self.state.ops, layer, query, self.state.scaling(layer))
        return of_heads.float().sum((0, 1)).masked_fill(masked, -torch.inf).expand(len(of_heads), -1)

    def wanted(self, layer: int, scores: Tensor, resident: Tensor) -> Tensor:
        k, pages = resident.shape[1], scores.shape[-1]
        is_held = mask_of(resident, pages)
        has_begun = self._position % self.geometry.page == 0
        is_held |= (self._ends == self._last) & has_begun  # a page that just left the newest
        is_held |= (resident < 0).all(1, keepdim=True)  # after a prompt
        is_top = mask_of(best(scores, max(1, self.k // SHARE)), pages)
        return best(scores.masked_fill(is_top, torch.inf).masked_fill(~(is_held | is_top), -torch.inf), k)
