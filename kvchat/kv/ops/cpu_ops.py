"""The operations of a decode step on a CPU, in numpy where tables are small.

Choosing and moving a layer's pages is some forty operations on a few hundred numbers: their number is what they cost.
What a tensor holds may be looked at here without a wait, so what does not change is skipped, and a numpy call costs
less than torch's. For 4 KV heads and 272 pages choosing takes 0.10 ms a layer (torch 0.24), moving 9 of 32 pages 0.06
(0.15) and opening them 0.05 (0.07) on one thread of an AMD EPYC. Tensors are shared with numpy, not copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvchat.kv.attention import Weights, attend
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots
from kvchat.kv.ops.selection import Candidates
from kvchat.kv.ops.torch_ops import TorchOps

Array = np.ndarray[Any, Any]

# numpy knows no bfloat16; rows are copied as whole numbers of their size.
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class CpuOps(TorchOps):
    """``TorchOps`` where nothing runs beside the model and asking costs no wait."""

    asks = True

    def begin_step(self, position: Tensor) -> None:
        super().begin_step(position)
        self._now = int(position)

    def attend(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec, needs_weights: bool
    ) -> tuple[Tensor, Weights | None]:
        if not (slots.layout.spills and self.geometry.unified):
            return super().attend(slots, layer, query, spec, needs_weights)
        g, end = self.geometry, self._now + 1
        first = 0 if spec.window is None else max(0, end - spec.window)
        keys, values = self.host.by_head(layer)[:, :, first:end].unbind()
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        attended, _ = attend(grouped, keys[..., : g.d_k], values[..., : g.d_v], None, spec, sinks)
        slots.active += g.kv_heads * (end - first)
        return attended, None

    def choose(self, scores: Tensor, candidates: Candidates, resident: Tensor, flagged: Tensor | None = None) -> Tensor:
        held = resident.numpy()
        wanted = np.full_like(held, EMPTY)
        among = scores[:, :, candidates.first : max(0, int(candidates.last) + 1)]
        if among.shape[2]:
            weights = among.softmax(-1, dtype=torch.float32).sum(1)
            best = weights.topk(min(wanted.shape[1], weights.shape[1])).indices.numpy()
            wanted[:, : best.shape[1]] = best + candidates.first
        same = (wanted[:, :, None] == held[:, None]) & (wanted >= 0)[:, :, None]
        placed = held.copy()
        # Every row has as many free slots as pages that are not there yet, -1 counted: they meet in order.
        placed[~same.any(1)] = wanted[~same.any(2)]
        if flagged is not None:
            placed = np.where(flagged.numpy()[:, None], placed, held)
        return torch.from_numpy(placed)

    def open_pages(self, slots: DeviceSlots, layers: slice, first: int, last: Tensor) -> None:
        pages, p = slots.pages[layers].numpy(), self.geometry.page
        tokens = pages[..., None] * p + np.arange(p)
        is_open = (tokens >= first) & (tokens <= int(last))  # an empty slot's are negative, so below first
        tokens[~is_open] = EMPTY
        slots.table[layers].numpy()[:, :, : slots.offset] = tokens.reshape(*pages.shape[:2], -1)

    def move_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, counters: Tensor) -> None:
        g, new = self.geometry, placed.numpy()
        head, slot = ((new != resident.numpy()) & (new >= 0)).nonzero()
        _count(counters, len(head) * g.page, int((new >= 0).sum()) * g.page)
        if len(head):
            keys = self.host.block_index(new[head, slot], slots.heads_of(layer).numpy()[head])
            source = rows(self.host.blocks(layer))
            target = rows(slots.blocks(layer)).reshape(2, len(new), -1, g.page * g.d)
            target[0, head, slot], target[1, head, slot] = source[keys], source[keys + self.host.value_blocks]


def rows(tensor: Tensor) -> Array:
    """The tensor's memory as whole numbers, for copies; of every dtype."""
    shared: Array = tensor.view(WHOLE[tensor.element_size()]).numpy()
    return shared


def _count(counters: Tensor, moved: int, wanted: int) -> None:
    counted = counters.numpy()
    counted[0] += moved
    counted[1] += wanted
