"""Operations of a decode step (append, attend, select, recall) in plain torch.

This is the reference, and the fallback on a GPU where Triton does not work. ``triton_ops`` has the same operations as
Triton kernels and ``cpu_ops`` as compiled loops, both tested against this. All shapes are static unless ``reads_back``,
when copies first select the changed rows. On a GPU that would force a synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, Partial, Products, Weights, attend, attend_prefill, products
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots
from kvchat.kv.memory.host_pool import HostPool, gather, scatter
from kvchat.kv.ops import key_codes
from kvchat.kv.ops.selection import (
    Candidates,
    Places,
    TokenQuery,
    assign_slots,
    heaviest,
    mask_of,
    needs_correction,
    page_scores,
    top_pages,
    unread_part,
)

SPILLED_BLOCK = 1024  # tokens per copy from the host pool, read once


class TorchOps:
    """A step's operations on the host pool and slots.

    ``reads_back``: nothing runs concurrently, so reading a tensor's values never waits. ``reads_staged``: attention
    reads spilled pages from ``DeviceSlots.staging`` and joins ``other_part``.
    """

    name = "torch"
    reads_back = False
    reads_staged = False

    def __init__(self, geometry: Geometry, host: HostPool, device: torch.device, kernel_refusal: str = "") -> None:
        self.geometry = geometry
        self.host = host
        self.kernel_refusal = kernel_refusal
        self._heads = torch.arange(geometry.kv_heads, device=device)

    @property
    def badges(self) -> tuple[str, ...]:
        return (f"no Triton kernels: {self.kernel_refusal}",) if self.kernel_refusal else ()

    def begin_step(self, position: Tensor) -> None:
        """Prepare for the first layer; ``position`` (0-d int64) is the new token's."""
        self.position = position
        rows = self.host.row_index(position, self._heads)
        self._host_rows = torch.cat((rows, rows + self.host.value_rows))

    # ---- append

    def assign(self, slots: DeviceSlots, position: Tensor) -> None:
        """Do ``DeviceSlots.assign``, at the latest when a layer calls ``append``."""
        slots.assign(position)

    def append(self, held: Sequence[DeviceSlots], layer: int, key: Tensor, value: Tensor) -> None:
        """Write the new token's ``key [H, d_k]`` and ``value [H, d_v]`` to its slots and to the host pool."""
        kv = self._packed(key, value)
        scatter(self.host.rows(layer), self._host_rows, kv.flatten(0, 1))
        for slots in held:
            slots.write(layer, kv)

    def update_bounds(self, bounds: Tensor, page: Tensor, keys: Tensor) -> None:
        """Widen ``bounds [H, page, 2 * d_k]`` of ``page`` (1-element int64) by the new token's ``keys [H, d_k]``."""
        row = torch.cat((keys, -keys), -1).unsqueeze(1)
        bounds.index_copy_(1, page, torch.maximum(bounds.index_select(1, page), row))

    # ---- attend

    def attend_new(self, query: Tensor, keys: Tensor, values: Tensor, start: int, spec: AttentionSpec) -> Tensor:
        """Compute ``attend_prefill`` of the tokens from position ``start`` on, over all of ``keys`` and ``values``."""
        return attend_prefill(query, keys, values, start, spec)

    def attend(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec, needs_weights: bool
    ) -> tuple[Tensor, Weights | None]:
        """Compute attention for the KV heads in ``slots`` and record what was read.

        Args:
            slots: K and V; H is its number of heads.
            layer: index of the layer.
            query: ``[H_q, d_k]`` of all heads of the model.
            spec: the layer's attention rule.
            needs_weights: whether to return the weights.

        Returns:
            ``[H, G, d_v]``, and the weights or None. Slots that spill have no weights.
        """
        bias = self.bias(slots, layer, spec.window)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        if slots.layout.spills and not slots.recent_only:
            return self._attend_spilled(
                slots, layer, Partial(grouped, self.geometry.d_v, spec, sinks), bias, spec
            ), None
        held = self.products(slots.keys(layer), slots.values(layer))
        attended, weights = attend(grouped, held, bias, spec, sinks, slots.other_part() if slots.other_part else None)
        return attended, Weights(weights) if needs_weights else None

    def products(self, keys: Tensor, values: Tensor) -> Products:
        """Return the products with ``keys [H, n, d_k]`` and ``values [H, n, d_v]``."""
        return products(keys, values)

    def keys(self, slots: DeviceSlots, layer: int) -> Tensor:
        """Return the keys of the tokens in ``slots``, ``[H, n, d_k]``."""
        return slots.keys(layer)

    def bias(self, slots: DeviceSlots, layer: int, window: int | None) -> Tensor:
        return slots.bias(layer, self.position, window)

    def _of_slots(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``query [H, G, d_k]`` and learned sinks ``[H, G]`` of the KV heads in ``slots``."""
        g = self.geometry
        sinks = None if spec.sinks is None else slots.pick(layer, spec.sinks.view(g.kv_heads, g.group), 0)
        return slots.pick(layer, query.view(g.kv_heads, g.group, g.d_k), 0), sinks

    def _attend_spilled(
        self, slots: DeviceSlots, layer: int, partial: Partial, bias: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Attend to the slots, and to the tokens that left them, which come from the host pool one block at a time."""
        g, heads = self.geometry, slots.heads_of(layer)[:, None]
        partial.add(slots.keys(layer), slots.values(layer), bias)
        last = self.position - slots.layout.window
        # A captured graph must not read back, so it reads up to the capacity. Elsewhere that would waste reads.
        end = int(last) + 1 if self.reads_back or not self.host.pinned else self.host.room
        for first in range(0, end, SPILLED_BLOCK):
            tokens = torch.arange(first, first + SPILLED_BLOCK, device=last.device)
            masked = (tokens > last) | (tokens < slots.layout.sink)
            if spec.window is not None:
                masked |= tokens <= self.position - spec.window
            keys, values = self._stored(layer, tokens.masked_fill(masked, 0), heads)
            bias = torch.zeros(masked.shape, device=last.device).masked_fill_(masked, float("-inf"))
            partial.add(keys[..., : g.d_k], values[..., : g.d_v], bias)
            slots.read_pairs += (~masked).sum() * len(heads)
        return partial.result()

    def _stored(self, layer: int, tokens: Tensor, heads: Tensor) -> Sequence[Tensor]:
        """Return K and V ``[H, n, d]`` of ``tokens [n]`` or ``[H or 1, n]`` of ``heads [H, 1]`` from the host pool."""
        index = self.host.row_index(tokens, heads)
        return [
            gather(self.host.rows(layer), rows.flatten()).view(len(heads), -1, self.geometry.d)
            for rows in (index, index + self.host.value_rows)
        ]

    # ---- select

    def page_scores(self, query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
        """Compute ``selection.page_scores``, ``[H, G, page]``: ``query [H_q, d_k]``, ``bounds [H, page, 2 * d_k]``."""
        return page_scores(query, bounds, scaling)

    def needs_correction(self, query: Tensor, before: Tensor, tau: float) -> Tensor:
        """Compute ``selection.needs_correction``: queries ``[H_q, d_k]`` -> bool ``[H]``."""
        return needs_correction(query, before, self.geometry.kv_heads, tau)

    def choose(self, scores: Tensor, candidates: Candidates, resident: Tensor, flagged: Tensor | None = None) -> Tensor:
        """Return the pages that each slot holds next.

        Args:
            scores: ``[H, G, page]``.
            candidates: pages that may be chosen.
            resident: ``[H, k]`` page in each slot, -1 = none.
            flagged: heads to choose for, bool ``[H]``, all by default; other heads keep their pages.

        Returns:
            ``[H, k]``, -1 = none.
        """
        wanted = top_pages(scores, candidates.masked, resident.shape[1])
        placed = assign_slots(wanted, resident, scores.shape[2], reuse=True)
        return placed if flagged is None else torch.where(flagged[:, None], placed, resident)

    def encode_keys(self, keys: Tensor, bits: int) -> Tensor:
        """Compute ``key_codes.encode``: ``keys [H, n, d_k]`` -> int32 ``[H, page, words]``."""
        return key_codes.encode(keys, self.geometry.page, bits)

    def token_scores(self, query: Tensor, index: Tensor, bits: int, scaling: float) -> Tensor:
        """Compute ``key_codes.token_scores``: ``query [H_q, d_k]``, ``index [H, page, words]`` -> ``[H, G, token]``."""
        return key_codes.token_scores(query, index, self.geometry.page, bits, scaling)

    def choose_tokens(
        self, by: TokenQuery, hidden: Tensor, masked: Tensor, resident: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens that each slot holds next, and ``unread_part`` of the other tokens that may be chosen.

        Args:
            by: query and index.
            hidden: tokens that have no weight, bool ``[token]``.
            masked: tokens that must not be chosen, bool ``[token]``.
            resident: ``[H, k]`` token in each slot, -1 = none.

        Returns:
            int64 ``[H, k]``, -1 = none; and float32 ``[H, G, d_v + 1]``, or None without mean values.
        """
        scores = self.token_scores(*by[:4])
        wanted = heaviest(scores, hidden, masked, resident.shape[1])
        placed = assign_slots(wanted, resident.long(), scores.shape[-1], reuse=True)
        return placed, self._unread_part(by, scores, ~(hidden | masked | mask_of(wanted, scores.shape[-1])))

    def list_tokens(
        self, slots: DeviceSlots, layer: int, by: TokenQuery, places: Places, k: int, pinned: Tensor, in_step: bool
    ) -> Tensor | None:
        """Write to the layer's table the tokens that each KV head reads.

        These are all of ``places`` outside the candidates, all that are ``pinned`` (bool ``[tokens]``, possibly
        shorter), and the ``k`` candidates of highest weight for ``by``. There are more than ``k`` candidates. If
        ``in_step``, the layer's attention follows and may do the choosing itself.

        Returns:
            ``unread_part``; None without mean values, or if attention joins it.
        """
        known, seen, first, last, end = places
        scores = self.token_scores(*by[:4])
        tokens = torch.arange(scores.shape[-1])
        is_pinned = torch.zeros(max(end, len(tokens)), dtype=torch.bool)
        is_pinned[: len(pinned)] = pinned[: len(is_pinned)]
        hidden, masked = (tokens < seen) | (tokens >= known), (tokens < first) | (tokens > last)
        best = heaviest(scores, hidden, masked | is_pinned[: len(tokens)], k)
        always = torch.arange(seen, end)
        always = always[(always < first) | (always > last) | is_pinned[seen:end]]
        named = torch.cat((best, always.expand(len(best), -1)), 1).sort(1).values
        table = slots.table_of(layer)
        table[:, : named.shape[1]] = named
        table[:, named.shape[1] :] = EMPTY
        slots.named[layer - slots.layout.first] = named.shape[1]
        unread = ~(hidden | masked | is_pinned[: len(tokens)] | mask_of(best, len(tokens)))
        return self._unread_part(by, scores, unread)

    def _unread_part(self, by: TokenQuery, scores: Tensor, unread: Tensor) -> Tensor | None:
        """Return ``unread_part`` of the tokens ``unread [H, n]`` with these ``scores``; None without mean values."""
        if by.means is None:
            return None
        excess = key_codes.excess(by.query, by.codes, self.geometry.page, by.bits, by.scaling)
        return unread_part(scores, unread, excess, by.means)

    def open_pages(self, slots: DeviceSlots, layers: slice, first: int, last: Tensor) -> None:
        slots.open_pages(layers, first, last)

    # ---- recall

    def move_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, counters: Tensor) -> None:
        """Copy the pages ``placed [H, k]`` that are not ``resident [H, k]`` into the layer's page slots.

        Adds the K/V pairs moved, wanted and moved from 8-bit pages to ``counters [3]``.
        """
        page, heads = self.geometry.page, slots.heads_of(layer)[:, None]
        changed = (placed != resident) & (placed >= 0)
        self._count(counters, changed, placed, page)
        self._bring_pages(slots, layer, placed.clamp(min=0), heads, changed)

    def move_tokens(
        self, slots: DeviceSlots, layer: int, first: int, placed: Tensor, resident: Tensor, counters: Tensor
    ) -> None:
        """Copy the tokens ``placed [H, n]`` that are not ``resident [H, n]`` into the layer's slots from ``first`` on.

        Then copies ``placed`` to ``resident``, whose rows are contiguous. Adds the K/V pairs moved, wanted and moved
        from 8-bit pages to ``counters [3]``.
        """
        changed = (placed != resident) & (placed >= 0)
        self._count(counters, changed, placed)
        width, n = placed.shape
        target = torch.arange(width, device=placed.device)[:, None] * slots.n
        target = target + first + torch.arange(n, device=placed.device)
        self._bring_tokens(slots, layer, placed.clamp(min=0), slots.heads_of(layer)[:, None], target, changed)
        resident.copy_(placed)

    def move_shared(self, slots: DeviceSlots, positions: Tensor, targets: Tensor, taken: Tensor) -> None:
        """Copy the tokens ``positions [m]`` to slots ``targets [m]`` of every head and layer, where ``taken [m]``."""
        layout = slots.layout
        heads = slots.heads_of(layout.first)[:, None]
        target = torch.arange(len(heads), device=targets.device)[:, None] * slots.n + targets
        # Rows that do not move are read too. Read position 0 for them: their own may be beyond the device's memory.
        read, changed = positions * taken, taken.expand(len(heads), -1)
        for layer in range(layout.first, layout.last):
            self._bring_tokens(slots, layer, read, heads, target, changed)

    def move_picked(self, slots: DeviceSlots, layer: int, rows: Tensor, positions: Tensor, targets: Tensor) -> None:
        """Copy tokens ``positions [m]`` of the heads of ``rows [m]`` to slots ``targets [m]``, between steps."""
        heads = slots.heads_of(layer)
        source, target = self.host.row_index(positions, heads[rows]), rows * slots.n + targets
        host, v_source = self.host.rows(layer), self.host.value_rows
        self._copy(host, slots.rows(layer), source, v_source, target, len(heads) * slots.n)

    # ---- helpers

    def _count(self, counters: Tensor, changed: Tensor, placed: Tensor, tokens: int = 1) -> None:
        """Count tokens moved, wanted, and moved from 8-bit pages; each of ``placed`` has ``tokens`` tokens."""
        counters[:2].add_(torch.stack((changed, placed >= 0)).sum((1, 2)), alpha=tokens)
        if (quantized := self.host.quantized_at(placed.clamp(min=0) * tokens)) is not None:
            counters[2:].add_((quantized & changed).sum(), alpha=tokens)

    def _bring_pages(self, slots: DeviceSlots, layer: int, pages: Tensor, heads: Tensor, changed: Tensor) -> None:
        """Copy ``pages [H, k]`` of ``heads [H, 1]`` into the layer's page slots where ``changed``."""
        page, head, v_source = self.host.block_strides
        v_target = len(pages) * slots.n // self.geometry.page
        source = pages * page + heads * head
        self._move(self.host.blocks(layer), slots.blocks(layer), source, v_source, slots.page_blocks, v_target, changed)

    def _bring_tokens(
        self, slots: DeviceSlots, layer: int, positions: Tensor, heads: Tensor, target: Tensor, changed: Tensor
    ) -> None:
        """Copy tokens ``positions [H or 1, n]`` of ``heads [H, 1]`` to rows ``target [H, n]`` where ``changed``."""
        source, v_target = self.host.row_index(positions, heads), len(target) * slots.n
        self._move(self.host.rows(layer), slots.rows(layer), source, self.host.value_rows, target, v_target, changed)

    def _move(
        self, host: Tensor, slots: Tensor, source: Tensor, v_source: int, target: Tensor, v_target: int, changed: Tensor
    ) -> None:
        """Copy rows ``source`` to rows ``target`` where ``changed``; V is ``v_source`` and ``v_target`` rows after K.

        If the changed rows may not be selected, unchanged rows are overwritten with their own content.
        """
        if self.reads_back or not self.host.pinned:
            self._copy(host, slots, source[changed], v_source, target[changed], v_target)
            return
        both = torch.cat((target.flatten(), target.flatten() + v_target))
        fresh = gather(host, torch.cat((source.flatten(), source.flatten() + v_source)))
        held = slots.index_select(0, both)
        slots.index_copy_(0, both, torch.where(changed.flatten().repeat(2)[:, None], fresh, held))

    def _copy(self, host: Tensor, slots: Tensor, source: Tensor, v_source: int, target: Tensor, v_target: int) -> None:
        both = torch.cat((source, source + v_source))
        slots.index_copy_(0, torch.cat((target, target + v_target)), gather(host, both))

    def _packed(self, key: Tensor, value: Tensor) -> Tensor:
        """Return K and V ``[H, d_k]``, ``[H, d_v]`` of one token as rows ``[2, H, d]``."""
        d = self.geometry.d
        if key.shape[-1] != value.shape[-1]:
            pad = torch.nn.functional.pad
            key, value = pad(key, (0, d - key.shape[-1])), pad(value, (0, d - value.shape[-1]))
        return torch.stack((key, value))
