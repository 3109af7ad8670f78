"""FreeKV that corrects a fixed share of heads at every step, whichever way their queries turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.freekv import FreeKV

if TYPE_CHECKING:
    from kvchat.kv.state import KVState

PERIOD = 64  # steps after which the same heads have their turn


class FixedCorrections(FreeKV):
    """In ``share`` of all steps a KV head is corrected, drawn for each layer and head.

    Whether queries turned is found out at the usual cost; then the answer is replaced, by the position on the device,
    so that a CUDA graph can contain it.
    """

    def __init__(
        self, share: float, parameters: SpeculativeParameters, geometry: Geometry, traits: ModelTraits
    ) -> None:
        super().__init__(parameters.of_pages(tau=0.0), geometry, traits)  # some heads are corrected
        self.share = share

    def attach(self, state: KVState) -> None:
        super().attach(state)
        g = self.geometry
        ranks = torch.rand((PERIOD, g.layers, g.kv_heads), generator=torch.Generator().manual_seed(0)).argsort(0)
        self._drawn = (ranks < round(self.share * PERIOD)).to(state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self._drawn]

    def needs_correction(self, layer: int, query: Tensor) -> Tensor:
        super().needs_correction(layer, query)
        return self._drawn.index_select(0, (self.state.position % PERIOD).view(1))[0, layer]
