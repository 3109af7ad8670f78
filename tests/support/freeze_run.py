"""A KV manager in freeze mode that decodes random K/V, with the mode's relevance score computed independently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from support.integrity import check_integrity
from support.kv_steps import decode_step, forward, prefill

from kvchat.config.modes import parse
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.freeze_timers import RULES

LAYERS, HEADS, GROUP, D = 2, 2, 2, 8
EVERYTHING = {"tau": 1e9}  # every token outside the window is flagged
TIMERS_ONLY = {"floor": 0, "stagger": 1, "recalls": False}  # changes to the rule: tokens freeze as the timers say
EARLY = {"floor": 60, "stagger": 4}


@contextmanager
def with_rule(**changes: Any) -> Iterator[None]:
    """Change the default profile's rule in this block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "default", replace(RULES["default"], **changes))
        yield


def spec(layer: int, windowed: bool) -> AttentionSpec:
    return AttentionSpec(scaling=1.0, window=24 if windowed and layer else None)


class FreezeRun:
    """A KV manager in freeze mode, decoding random K/V of two independent layers; ``strength`` makes attention peaked.

    ``rule`` changes the default profile's rule.
    """

    def __init__(
        self,
        strength: float = 0.3,
        windowed: bool = False,
        page: int = 8,
        unified: bool = False,
        rule: dict[str, Any] | None = None,
        **params: Any,
    ):
        self.geometry = Geometry(LAYERS, HEADS * GROUP, HEADS, D, D, torch.float32, page, unified=unified)
        self.random = torch.Generator().manual_seed(0)
        self.strength, self.windowed = strength, windowed
        with with_rule(**(rule or {})):
            mode = build(parse("freeze", params), self.geometry, ModelTraits(4096, (None,) * LAYERS))
        self.kv = KVManager(self.geometry, torch.device("cpu"), mode)
        self.keys = [torch.empty(HEADS, 0, D) for _ in range(LAYERS)]
        self.query: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []  # of the last forward's newest token, by layer
        self._wanted: tuple[int, int] | None = None

    def begun(self, prompt: int, steps: int = 0) -> Self:
        """Prefill ``prompt`` tokens, decode ``steps`` steps, and return itself."""
        self.prefill(prompt)
        self.step(steps)
        return self

    def prefill(self, n: int, pinned: tuple[int, ...] = ()) -> None:
        with torch.inference_mode():
            with prefill(self.kv, n, pinned):
                self._forward(n)
            self.kv.refill(fresh=True)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            with torch.inference_mode(), decode_step(self.kv), forward(self.kv):
                self._forward(1)

    def look_for(self, layer: int, token: int) -> None:
        """One step in which the first KV head's queries of a layer look for a token's key."""
        self._wanted = layer, token
        self.step()
        self._wanted = None

    def truncate(self, n: int) -> None:
        with torch.inference_mode():
            self.kv.truncate(n)
        self.keys = [keys[:, :n] for keys in self.keys]

    def recover(self, level: str) -> None:
        with torch.inference_mode():
            self.kv.mode.recover(level)

    def active(self) -> set[int]:
        """The stored tokens that the next one reads."""
        return set((~self.kv.mode.timers.frozen[: self.kv.total]).nonzero().flatten().tolist())

    def check(self) -> None:
        check_integrity(self.kv.state)
        (slots,) = self.kv.state.slots
        held = slots.table[slots.table >= 0].tolist()
        assert len(held) == len(set(held))
        assert set(held) <= self.active()

    def relevance(self, read: set[int], sink: int) -> dict[int, float]:
        """``prob_rel`` of the tokens the last step read: mean over heads, then over the layers that can see them."""
        sums: dict[int, list[float]] = {}
        total = self.kv.total
        for layer in range(LAYERS):
            window = spec(layer, self.windowed).window
            seen = sorted(j for j in read if window is None or j > total - 1 - window)
            counted = [i for i, j in enumerate(seen) if j >= sink]
            logits = self.query[layer].double() @ self.keys[layer][:, seen].double().transpose(1, 2)
            weights = logits.softmax(-1).flatten(0, 1)
            shares = weights / weights[:, counted].sum(1, keepdim=True) * len(counted)
            for i, j in enumerate(seen):
                sums.setdefault(j, []).append(float(shares[:, i].mean()))
        return {j: sum(sums[j]) / len(sums[j]) if j in sums else 0.0 for j in read}

    def _forward(self, n: int) -> None:
        self.query, self.outputs = [], []
        for layer in range(LAYERS):
            q, k, v = (torch.randn(heads, n, D, generator=self.random) for heads in (HEADS * GROUP, HEADS, HEADS))
            k = k * self.strength
            if self._wanted and self._wanted[0] == layer:
                # In all heads of the group: opposite ones would divide their weight between two pages.
                q[:GROUP] = 1e4 * self.keys[layer][0, self._wanted[1]]
            self.keys[layer] = torch.cat((self.keys[layer], k), 1)
            self.query.append(q[:, -1].view(HEADS, GROUP, D))
            self.outputs.append(self.kv.attention(layer, q, k, v, spec(layer, self.windowed))[:, -1])
