"""The operations of a decode step on a CPU, where nothing runs beside the model and reading back costs no wait.

What does not change is skipped. Choosing and moving a layer's pages and the products of attention (``cpu_products``)
are loops that numba compiles; without numba they are torch's, and in float16 what reads K, V or bounds is. Tensors are
shared with numpy, not copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvchat.kv.attention import Products, Weights, attend, products
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots
from kvchat.kv.ops import cpu_products, key_codes
from kvchat.kv.ops.selection import Candidates, Places
from kvchat.kv.ops.torch_ops import TorchOps


class CpuOps(TorchOps):
    """``TorchOps`` that may read back."""

    reads_back = True

    def begin_step(self, position: Tensor) -> None:
        super().begin_step(position)
        self._now = int(position)

    def attend(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec, needs_weights: bool
    ) -> tuple[Tensor, Weights | None]:
        if slots.layout.listed:
            return self._attend_listed(slots, layer, query, spec), None
        if slots.layout.in_place:
            attended, weights = self._attend_in_place(slots, layer, query, spec)
            return attended, Weights(weights) if needs_weights else None
        if slots.layout.spills and self.geometry.unified:
            return self._attend_stored(slots, layer, query, spec), None
        return super().attend(slots, layer, query, spec, needs_weights)

    def products(self, keys: Tensor, values: Tensor) -> Products:
        return cpu_products.in_a_row(keys, values)

    def _attend_stored(self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over everything that the layer sees, where it is stored."""
        end = self._now + 1
        first = 0 if spec.window is None else max(0, end - spec.window)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        slots.read_pairs += self.geometry.kv_heads * (end - first)
        return attend(grouped, self._products_of_all(layer, first, end), None, spec, sinks)[0]

    def _attend_listed(self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over the tokens that each head's table names, where they are stored."""
        end, named = self._now + 1, slots.named[layer - slots.layout.first]
        first = 0 if spec.window is None else max(0, end - spec.window)
        slots.read_pairs += self.geometry.kv_heads * named
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        if named == end - first:
            return attend(grouped, self._products_of_all(layer, first, end), None, spec, sinks)[0]
        return self._attend_some(layer, grouped, slots.table_of(layer)[:, :named], spec, sinks)

    def _attend_some(
        self, layer: int, query: Tensor, table: Tensor, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """Attention of ``query [H, G, d_k]`` over the tokens in ``table [H, n]``."""
        keys, values = self._in_a_row(layer, 0, self._now + 1)
        attended = cpu_products.attended(query, keys, values, table, spec, sinks)
        if attended is None:
            return attend(query, products(*self._gathered(layer, table)), None, spec, sinks)[0]
        return attended

    def _attend_in_place(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attention over the tokens that the table names, where they are stored, and the weights of these slots."""
        bias = slots.bias(layer, self.position, spec.window)
        end, named = self._now + 1, int(slots.current_slot) + 1  # in order from the front, the new token last
        first = 0 if spec.window is None else max(0, end - spec.window)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        if named == end:
            attended, weights = attend(grouped, self._products_of_all(layer, first, end), None, spec, sinks)
            return attended, torch.nn.functional.pad(weights, (first, 0)) if first else weights
        some = self._products_of_some(layer, slots.table[0, :, :named], first)
        return attend(grouped, some, None if spec.window is None else bias[..., :named], spec, sinks)

    def _products_of_all(self, layer: int, first: int, end: int) -> Products:
        """Those of the stored tokens from ``first`` up to ``end``."""
        return self.products(*self._in_a_row(layer, first, end))

    def _products_of_some(self, layer: int, table: Tensor, first: int) -> Products:
        """Those of the tokens in ``table [H or 1, n]``; what lies before ``first`` need not be right."""
        scattered = cpu_products.scattered(*self._in_a_row(layer, 0, self._now + 1), table, first)
        return scattered or products(*self._gathered(layer, table))

    def _in_a_row(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens from ``first`` up to ``end``."""
        keys, values = self.host.by_head(layer)[:, :, first:end].unbind()
        return keys[..., : self.geometry.d_k], values[..., : self.geometry.d_v]

    def _gathered(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of the tokens in ``table [H or 1, n]``."""
        keys, values = self._stored(layer, table.clamp(min=0).long(), self._heads[:, None])
        return keys[..., : self.geometry.d_k], values[..., : self.geometry.d_v]

    def keys(self, slots: DeviceSlots, layer: int) -> Tensor:
        return self._gathered(layer, slots.table[0])[0] if slots.layout.in_place else super().keys(slots, layer)

    def bias(self, slots: DeviceSlots, layer: int, window: int | None) -> Tensor:
        table = slots.table_of(layer)
        # A table for all layers is looked at once a step.
        if slots.layout.shared or not (loops := cpu_products.loops_over(self.geometry.dtype)):
            return super().bias(slots, layer, window)
        bias = torch.empty(table.shape)
        first = 0 if window is None else max(0, self._now + 1 - window)
        slots.read_pairs += loops.open_slots(table.numpy(), slots.attended_of(layer).numpy(), first, bias.numpy())
        return bias.unsqueeze(1)

    def page_scores(self, query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
        if not (loops := cpu_products.loops_over(bounds.dtype)):
            return super().page_scores(query, bounds, scaling)
        grouped, scores = _by_head(query, bounds)
        loops.page_scores(grouped, cpu_products.numbers(bounds), scaling, scores.numpy())
        return scores

    def choose(self, scores: Tensor, candidates: Candidates, resident: Tensor, flagged: Tensor | None = None) -> Tensor:
        if not (loops := cpu_products.compiled_loops()):
            return super().choose(scores, candidates, resident, flagged)
        first, last = candidates.first, int(candidates.last)
        if last < first or not resident.numel():
            return torch.full_like(resident, EMPTY)
        placed = torch.empty_like(resident)
        loops.choose(scores.float().numpy(), first, last, resident.numpy(), placed.numpy())
        return placed if flagged is None else torch.where(flagged[:, None], placed, resident)

    def list_tokens(
        self,
        slots: DeviceSlots,
        layer: int,
        query: Tensor,
        index: Tensor,
        bits: int,
        places: Places,
        k: int,
        pinned: Tensor,
        scaling: float,
    ) -> None:
        g, table = self.geometry, slots.table_of(layer)
        if not (k and (loops := cpu_products.token_loops(g))):
            super().list_tokens(slots, layer, query, index, bits, places, k, pinned, scaling)
            return
        grouped = query.contiguous().float().view(g.kv_heads, g.group, g.d_k).numpy()
        stored = index.view(torch.uint32).numpy(), index.view(torch.uint16).numpy()
        sizes = key_codes.width_of(g.d_k, bits), bits
        named = loops.choose_tokens(grouped, scaling, *stored, *sizes, *places, k, pinned.numpy(), table.numpy())
        slots.named[layer - slots.layout.first] = named

    def open_pages(self, slots: DeviceSlots, layers: slice, first: int, last: Tensor) -> None:
        if not (loops := cpu_products.compiled_loops()):
            super().open_pages(slots, layers, first, last)
            return
        pages, table = slots.pages[layers].numpy(), slots.table[layers].numpy()
        loops.open_pages(pages, table, self.geometry.page, first, int(last))

    def move_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, counters: Tensor) -> None:
        if not (loops := cpu_products.compiled_loops()):
            super().move_pages(slots, layer, placed, resident, counters)
            return
        source, target = (rows.view(torch.int64).numpy() for rows in (self.host.blocks(layer), slots.blocks(layer)))
        target = target.reshape(2, len(placed), -1, target.shape[1])
        pages = slots.heads_of(layer).numpy(), placed.numpy(), resident.numpy()
        loops.move_pages(source, target, *self.host.block_strides, *pages, self.geometry.page, counters.numpy())

    def _move(
        self, host: Tensor, slots: Tensor, source: Tensor, v_source: int, target: Tensor, v_target: int, changed: Tensor
    ) -> None:
        if not (loops := cpu_products.compiled_loops()):
            super()._move(host, slots, source, v_source, target, v_target, changed)
            return
        stored, held = (rows.view(torch.uint8).numpy() for rows in (host, slots))
        loops.move_rows(stored, held, source.numpy(), v_source, target.numpy(), v_target, changed.numpy())


def _by_head(query: Tensor, bounds: Tensor) -> tuple[np.ndarray[Any, Any], Tensor]:
    """``query [H_q, d_k]`` as ``[H, G, d_k]``, and room for its scores of the pages in ``bounds``: ``[H, G, page]``."""
    heads, pages, _ = bounds.shape
    grouped = query.contiguous().float().view(heads, -1, query.shape[-1])
    return grouped.numpy(), torch.empty((heads, grouped.shape[1], pages))
