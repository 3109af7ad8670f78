"""A conversation whose full pages are stored in 8 bits, compared with dense attention over K/V quantized by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.dense_attention import assert_near, dense
from support.integrity import check_integrity
from support.kv_run import Run
from support.kv_steps import prefill
from support.toy_model import Toy
from torch import Tensor

from kvchat.kv.inspect import attended
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.modes.speculative import Speculative
from kvchat.kv.ops import key_codes


def in_8_bits(x: Tensor, tokens_share: bool) -> Tensor:
    """A page ``[H, p, d]``, quantized and restored: a scale per channel for keys (``tokens_share``), else per token."""
    values = x.float().numpy()
    scale = torch.from_numpy(np.abs(values).max(1 if tokens_share else 2, keepdims=True) / 127).to(x.dtype)
    scale = scale.float().numpy()
    codes = np.floor(values / np.where(scale == 0, 1, scale) + np.float32(0.5)).clip(-127, 127)
    return torch.from_numpy((codes * scale).astype(np.float32)).to(x.dtype)


class EightBitRun(Run):
    """``Run`` with ``quantizes``: pages that get full while it is set are stored in 8 bits.

    ``stored`` are the keys and values of each layer that the host pool holds; ``keys`` and ``values`` are exact, except
    in a page that a truncation cut.
    """

    def __init__(self, made: Toy, mode: str, quantizes: bool = True, **params: Any) -> None:
        super().__init__(made, mode, **params)
        self.exact = False  # bounds may come from exact keys or from stored ones: the manager's own sets are used
        self.stored = [(keys.clone(), values.clone()) for keys, values in zip(self.keys, self.values, strict=True)]
        self.full = 0
        self.set(quantizes)

    def set(self, quantizes: bool) -> None:
        self.quantizes = quantizes
        self.kv.state.quantize_pages(quantizes)

    def prefill(self, n: int, chunk: int = 1000) -> None:
        for low in range(0, n, chunk):
            ids, start = self._new_ids(min(chunk, n - low)), len(self.ids)
            with prefill(self.kv, len(ids)):
                for layer in range(self.toy.geometry.layers):
                    self._check_prefill(layer, ids, start)
            self.ids += ids
            self._store()
        self.kv.refill()
        self.reference.enter(len(self.ids))

    def truncate(self, n: int) -> None:
        self.stored = [(keys[:, :n], values[:, :n]) for keys, values in self.stored]
        super().truncate(n)
        # An 8-bit page that is cut continues from its quantized tokens.
        self.full = n // self.toy.geometry.page
        tail = slice(self.full * self.toy.geometry.page, n)
        for layer, (keys, values) in enumerate(self.stored):
            self.keys[layer] = torch.cat((self.keys[layer][:, : tail.start], keys[:, tail]), 1)
            self.values[layer] = torch.cat((self.values[layer][:, : tail.start], values[:, tail]), 1)

    def check(self) -> None:
        assert self.kv.total == len(self.ids)
        check_integrity(self.kv.state)
        for layer, stored in enumerate(self.stored):
            for found, expected in zip(self.kv.state.host.dense(layer, self.kv.total), stored, strict=True):
                assert torch.equal(found, expected), f"layer {layer}"

    # ---- inside

    def _step(self, ids: list[int]) -> list[Tensor]:
        outputs = super()._step(ids)
        self._store()
        return outputs

    def _check_prefill(self, layer: int, ids: list[int], start: int) -> None:
        """Check that attention reads old tokens as stored and new ones exactly."""
        spec = self.toy.specs[layer]
        q, k, v = self.toy.qkv(layer, ids, start)
        output = self.kv.attention(layer, q, k, v, spec)
        self._keep(layer, k, v)
        self.query[layer] = q[:, -1]
        keys, values = (torch.cat(parts, 1) for parts in zip(self.stored[layer], (k, v), strict=True))
        seen = torch.arange(start + len(ids)) > start + len(ids) - 1 - (spec.window or start + len(ids))
        expected = dense(q[:, -1], keys, values, seen.expand(len(keys), -1), spec)
        assert_near(output[:, -1], expected, self.toy.geometry.dtype, f"prefill, layer {layer}")

    def _check_step(self, layer: int, query: Tensor, output: Tensor) -> None:
        spec, total = self.toy.specs[layer], len(self.ids)
        exact = self.keys[layer], self.values[layer]
        keys, values = (torch.cat((a, b[:, -1:]), 1) for a, b in zip(self.stored[layer], exact, strict=True))
        for slots in self.kv.state.slots_of[layer]:
            if slots.layout.in_place:
                continue
            self._mark_exact(slots, layer, keys, values)
        self.keys[layer] = keys  # the reference rotates a mode's sinks
        seen = attended(self.kv.state, layer)
        others = self._others(layer, query, seen) if isinstance(self.kv.mode, Speculative) else None
        expected = dense(query, self.reference.keys(layer), values, seen, spec, others)
        self.keys[layer] = exact[0]
        assert_near(output, expected, self.toy.geometry.dtype, f"{self.kv.mode.name}, layer {layer}, token {total - 1}")

    def _others(self, layer: int, query: Tensor, seen: Tensor) -> tuple[Tensor, Tensor] | None:
        """``others`` of ``dense`` for tokens not ``seen``, by the mode's own index of exact or stored K/V, or None."""
        mode, g, spec = self.kv.mode, self.toy.geometry, self.toy.specs[layer]
        known, last = (len(self.ids) - 1) // g.page, len(self.ids) - 1 - (spec.window or len(self.ids))
        if layer < mode.first or not known or spec.softcap is not None:
            return None
        index, means = (each.of(layer)[:, :known] for each in mode.summaries)
        by = query, index, g.page, mode.bits, spec.scaling
        too_high = key_codes.excess(*by).repeat_interleave(g.page, -1)
        hidden = seen[:, None, : known * g.page] | (torch.arange(known * g.page) <= last)
        logits = (key_codes.token_scores(*by) - too_high).masked_fill(hidden, -torch.inf)
        return logits.flatten(0, 1).double(), means.double().repeat_interleave(g.page, 1)

    def _mark_exact(self, slots: DeviceSlots, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put exact K/V into ``keys`` and ``values`` where a slot holds them; check that others hold stored ones.

        Pages may have left their slots since.
        """
        heads = slots.heads_of(layer).tolist()
        table = slots.attended_of(layer).expand(len(heads), -1)
        exact = self.keys[layer], self.values[layer]
        held = slots.keys(layer), slots.values(layer)
        for row, head in enumerate(heads):
            for slot in (table[row] >= 0).nonzero().flatten().tolist():
                token = int(table[row, slot])
                for found, computed, stored in zip(held, exact, (keys, values), strict=True):
                    if torch.equal(found[row, slot], computed[head, token]):
                        stored[head, token] = computed[head, token]
                    elif slot >= slots.offset and (found is held[1] or slot >= slots.ring):
                        assert torch.equal(found[row, slot], stored[head, token])

    def _store(self) -> None:
        """Record the newest tokens as stored, and quantize the pages that they filled."""
        p = self.toy.geometry.page
        for layer, (keys, values) in enumerate(self.stored):
            new = slice(keys.shape[1], len(self.ids))
            keys, values = (
                torch.cat(x, 1) for x in ((keys, self.keys[layer][:, new]), (values, self.values[layer][:, new]))
            )
            for page in range(self.full, len(self.ids) // p):
                at = slice(page * p, (page + 1) * p)
                if self.quantizes:
                    keys[:, at], values[:, at] = in_8_bits(keys[:, at], True), in_8_bits(values[:, at], False)
            self.stored[layer] = keys, values
        self.full = len(self.ids) // p
