"""arkvale: pages stay on the device until they are the worst of those there, and all that are there are read.

Paper: ArkVale (NeurIPS 2024); rule and parameters as in the authors' program. A full page's digest is a box around its
keys: its center c is half the sum of their element-wise maximum and minimum, its half-width r_d the mean of
|c_d - k_d|. The score of a page is sum_d max(q_d (c + r)_d, q_d (c - r)_d), over all heads together: a layer has one
choice. Two pages of sinks and the two newest are always there. After a prompt the best others by its last query are
there too, as many as the budget holds. Each token makes the best half of so many resident, in place of the worst, and
reads all that are resident.

Departures:
    * How the heads' scores are joined was not found in a readable source; here it is their sum.
    * Half is that of the pages beside sinks and newest ones; the program takes half of the budget, less those.
    * A page that leaves the newest ones is resident until it is the worst, as one that was recalled.
    * The recall for a later layer by an earlier one's query (an option there, off) is left out.

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
SHARE = 2  # of the resident pages one in so many is made resident at each token, at least


class PageBoxes(PageBounds):
    """Digests, stored as bounds are: ``[c + r | r - c]``."""

    def summary(self, keys: Tensor, pages: int) -> Tensor:
        by_page = tiles(keys, pages, self.geometry.page)
        center = (by_page.amax(2) + by_page.amin(2)) / 2
        width = (center.unsqueeze(2) - by_page).abs().mean(2)
        return torch.cat((center + width, width - center), -1).to(self.dtype)


class ArkVale(PageChoice):
    """Pages by the score of their boxes, one choice for all heads of a layer, evicted worst first."""

    sink_pages = SINK_PAGES
    newest_pages = NEWEST_PAGES
    index: PageBoxes

    def _new_index(self, device: torch.device) -> PageBoxes:
        return PageBoxes(self.geometry, device, self.first)

    def fill(self, fresh: bool) -> None:
        self.slots.pages.fill_(-1)  # what is resident after a prompt, its last query says alone
        super().fill(fresh)

    def scores(self, layer: int, query: Tensor, masked: Tensor) -> Tensor:
        of_heads = self.index.scores(self.state.ops, layer, query, self.state.scaling(layer))
        return of_heads.float().sum((0, 1)).masked_fill(masked, -torch.inf).expand(len(of_heads), -1)

    def wanted(self, layer: int, scores: Tensor, resident: Tensor) -> Tensor:
        k, pages = resident.shape[1], scores.shape[-1]
        is_held = mask_of(resident, pages)
        has_begun = self._position % self.geometry.page == 0
        is_held |= (self._ends == self._last) & has_begun  # a page that has just left the newest ones
        is_held |= (resident < 0).all(1, keepdim=True)  # after a prompt
        is_top = mask_of(best(scores, max(1, self.k // SHARE)), pages)
        return best(scores.masked_fill(is_top, torch.inf).masked_fill(~(is_held | is_top), -torch.inf), k)
