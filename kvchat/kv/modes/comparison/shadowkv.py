"""shadowkv: reads the pages with the most attention to their mean keys, and pages whose keys differ from their mean.

Paper: ShadowKV (arXiv 2410.21465), its selection; parameters as in the authors' program. A page's landmark is the mean
of its rotated keys. After a prompt, each KV head's outliers are the pages whose minimum of cos(landmark, key) is
lowest. They have no landmark and are always read, as are the newest pages. A token reads the other pages with the
highest softmax(q . landmark / sqrt(d)), by the maximum over the group's query heads.

Departures:
    * The keys are not compressed. The paper keeps a singular value decomposition of rank 160 of the unrotated keys on
      the device and recalls only values. This mode recalls exact keys and values, so it reads the same tokens without
      the error of that rank, but with other memory and traffic than the paper.
    * A page has 32 tokens, the paper's chunk 8. The budget covers everything read: two of its pages are the newest, and
      a sixth of the rest are outliers (none below 256 tokens; the paper has 384 tokens in addition to 2,048).
    * Decoded pages become candidates when they are no longer among the newest; the paper keeps all of them.

Shapes: tables ``[layers, H, k * p + 2 * p]``, landmarks ``[layers, H, page, d_k]``. Costs: as quest, half the index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.modes.base import Plan
from kvchat.kv.modes.comparison.page_choice import PageChoice, tiles
from kvchat.kv.modes.page_index import PageIndex
from kvchat.kv.ops.selection import best, mask_of
from kvchat.kv.state import KVState

NEWEST_PAGES = 2
OUTLIER_SHARE = 6  # outliers are one in 6 of the pages, without the newest


class Landmarks(PageIndex):
    """The mean of each page's keys."""

    def __init__(self, geometry: Geometry, device: torch.device, first: int = 0) -> None:
        self.dtype, self.width = geometry.dtype, geometry.d_k
        super().__init__(geometry, device, first)

    def summary(self, keys: Tensor, pages: int) -> Tensor:
        return tiles(keys, pages, self.geometry.page).mean(2).to(self.dtype)


class ShadowKV(PageChoice):
    """Chooses pages by their landmarks, and outliers once per prompt."""

    newest_pages = NEWEST_PAGES
    index: Landmarks

    def _set_up(self) -> None:
        super()._set_up()
        self.outliers = self.k // OUTLIER_SHARE

    def _new_index(self, device: torch.device) -> Landmarks:
        return Landmarks(self.geometry, device, self.first)

    def plan(self, capacity: int) -> Plan:
        plan, g = super().plan(capacity), self.geometry
        numbers = (g.layers - self.first) * g.kv_heads * self.outliers * torch.int64.itemsize
        return Plan(plan.layouts, plan.state_bytes + numbers)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        g = self.geometry
        shape = (g.layers - self.first, g.kv_heads, self.outliers)
        self.outlying = torch.full(shape, EMPTY, dtype=torch.int64, device=state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self.outlying]

    def fill(self, fresh: bool) -> None:
        self.index.refresh(self.state.host)
        for layer in range(self.first, self.geometry.layers if self.outliers else 0):
            self.outlying[layer - self.first] = self._least_alike(layer)
        super().fill(fresh)

    def _least_alike(self, layer: int) -> Tensor:
        """Return the outliers ``[H, n]`` among the stored full pages, except the newest ones."""
        g = self.geometry
        pages = self.state.total // g.page - (self.newest_pages - 1)
        if pages <= 0:
            return torch.full_like(self.outlying[0], EMPTY)
        keys = self.state.host.dense(layer, pages * g.page)[0].reshape(g.kv_heads, pages, g.page, -1).float()
        alike = torch.cosine_similarity(keys, keys.mean(2, keepdim=True), -1)
        return best(-alike.amin(2), self.outliers)

    def scores(self, layer: int, query: Tensor, masked: Tensor) -> Tensor:
        landmarks = self.index.of(layer)
        grouped = query.view(len(landmarks), -1, query.shape[-1]) * self.state.scaling(layer)
        logits = torch.bmm(grouped, landmarks.transpose(1, 2)).float()
        is_outlier = mask_of(self.outlying[layer - self.first], self.index.pages) & ~masked
        others = logits.masked_fill((masked | is_outlier).unsqueeze(1), -torch.inf)
        shares = others.softmax(-1).nan_to_num(0).amax(1)  # NaN if all are masked
        return shares.masked_fill(is_outlier, torch.inf).masked_fill(masked, -torch.inf)
