"""A conversation with the toy model: drives a KV manager and compares every output and set with the reference."""

from __future__ import annotations

from typing import Any, Self

import torch
from support.comparison_reference import COMPARISON
from support.comparison_reference import ROWS as ASKED
from support.dense_attention import assert_near, dense
from support.freeze_reference import FreezeReference
from support.integrity import check_integrity
from support.kv_steps import decode_step, forward, prefill
from support.mode_rows import ROWS
from support.reference import FreeKVReference, FullReference, SpeculativeReference, StreamingReference, SyncReference
from support.toy_model import Toy
from torch import Tensor

from kvchat.config.modes import parse
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.modes.streaming import Streaming

REFERENCES: dict[str, type[FullReference]] = {
    "full": FullReference,
    "freeze": FreezeReference,
    "streaming": StreamingReference,
    "sync": SyncReference,
    "speculative": SpeculativeReference,
    **COMPARISON,
}


class Run:
    """Drives a KV manager with a ``Toy`` and compares every output and every set with the reference.

    ``exact`` is off for half precision, whose page scores may rank close pages differently: then only outputs are
    compared, over the manager's own sets.
    """

    def __init__(self, made: Toy, mode: str, system_tokens: int = 0, **params: Any) -> None:
        self.toy = made
        self.system_tokens = system_tokens
        self.exact = made.geometry.dtype is torch.float32
        self.ids: list[int] = []
        self.fresh = 0
        self.pins: list[int] = []
        g = made.geometry
        self.keys = [torch.empty(g.kv_heads, 0, g.d_k, dtype=g.dtype) for _ in range(g.layers)]
        self.values = [torch.empty(g.kv_heads, 0, g.d_v, dtype=g.dtype) for _ in range(g.layers)]
        self.query = [torch.zeros(g.q_heads, g.d_k, dtype=g.dtype) for _ in range(g.layers)]
        self.asked: list[dict[int, Tensor]] = [{} for _ in range(g.layers)]
        self.kv = KVManager(g, torch.device("cpu"), self.mode(mode, **params))
        self._make_reference()

    @classmethod
    def of_row(cls, row: str, made: Toy) -> Run:
        """A run in the mode and with the parameters of a row of ``mode_rows``."""
        mode, params = ROWS[row]
        return cls(made, mode, **params)

    def mode(self, mode: str, **params: Any) -> Any:
        return build(parse(mode, params), self.toy.geometry, self.toy.traits, self.system_tokens)

    # ---- what a session does

    def begun(self, prompt: int, steps: int = 0) -> Self:
        """Prefill ``prompt`` tokens, decode ``steps`` steps, and return itself."""
        self.prefill(prompt)
        self.step(steps)
        return self

    def prefill(self, n: int, chunk: int = 1000) -> None:
        cached = self.kv.mode.num_cached() if isinstance(self.kv.mode, Streaming) else self.kv.total
        for low in range(0, n, chunk):
            ids = self._new_ids(min(chunk, n - low))
            start = len(self.ids)
            with prefill(self.kv, len(ids)):
                for layer in range(self.toy.geometry.layers):
                    self._prefill_layer(layer, ids, start)
            self.ids += ids
        self.kv.refill()
        self.reference.enter(cached + n)

    def store_only(self, n: int) -> None:
        """Store ``n`` tokens as a prefill does, without its quadratic attention."""
        ids = self._new_ids(n)
        self.kv.state.host.reserve(n)
        for layer in range(self.toy.geometry.layers):
            q, k, v = self.toy.qkv(layer, ids, 0)
            self.kv.state.host.append(layer, 0, k, v)
            self.kv.state.query[layer] = self.query[layer] = q[:, -1]
            self._keep(layer, k, v)
        self.ids += ids
        self.kv.state.host.total = n
        self.kv.refill(fresh=True)
        self.reference.enter(n)

    def step(self, n: int = 1) -> list[Tensor]:
        """Decode ``n`` steps; return the last one's outputs, one ``[H_q, d_v]`` per layer."""
        outputs: list[Tensor] = []
        for _ in range(n):
            outputs = self._step(self._new_ids(1))
        return outputs

    def step_alone(self) -> None:
        """A step that the reference does not follow: after a failure it does not know scores and queries."""
        with decode_step(self.kv), forward(self.kv):
            for layer, spec in enumerate(self.toy.specs):
                self.kv.attention(layer, *self.toy.qkv(layer, [900], self.kv.total), spec)

    def switch(self, mode: str, **params: Any) -> int:
        moved = self.kv.switch(self.mode(mode, **params))
        self._make_reference()
        return moved

    def pin(self, positions: list[int]) -> None:
        self.kv.pin(positions)
        self.pins = positions
        self.reference.enter(len(self.ids))

    def truncate(self, n: int) -> None:
        self.kv.truncate(n)
        del self.ids[n:]
        self.pins = [position for position in self.pins if position < n]
        self.keys = [keys[:, :n] for keys in self.keys]
        self.values = [values[:, :n] for values in self.values]
        self.asked = [{at: query for at, query in asked.items() if at < n} for asked in self.asked]
        self.reference.enter(len(self.ids))

    # ---- checks

    def check(self) -> None:
        """Check that K/V in the host pool and in the slots equal what was projected, bit for bit."""
        assert self.kv.total == len(self.ids)
        check_integrity(self.kv.state)
        for layer in range(self.toy.geometry.layers):
            keys, values = self.kv.state.host.dense(layer, self.kv.total)
            assert torch.equal(keys, self.keys[layer]), f"stored keys of layer {layer}"
            assert torch.equal(values, self.values[layer]), f"stored values of layer {layer}"

    def _step(self, ids: list[int]) -> list[Tensor]:
        layers = range(self.toy.geometry.layers)
        new = [self.toy.qkv(layer, ids, len(self.ids)) for layer in layers]
        with decode_step(self.kv), forward(self.kv):
            outputs = [self.kv.attention(i, *new[i], self.toy.specs[i])[:, 0] for i in layers]
        self.ids += ids
        for layer in layers:
            q, k, v = new[layer]
            self._keep(layer, k, v)
            self._check_step(layer, q[:, 0], outputs[layer])
            self.query[layer] = q[:, 0]
        self.reference.end()
        return outputs

    def _check_step(self, layer: int, query: Tensor, output: Tensor) -> None:
        spec, total = self.toy.specs[layer], len(self.ids)
        where = f"{self.kv.mode.name}, layer {layer}, token {total - 1}"
        mask = self.reference.reads(layer, query)
        mask[:, self.pins] = True
        mask[:, : self.kv.mode.pinned] = True
        visible = torch.arange(total) > total - 1 - (spec.window or total)
        mask = mask & visible
        seen = attended(self.kv.state, layer)
        assert not self.kv.step.exact or bool(seen[:, visible].all()), f"{where}: the step is not exact"
        if self.exact:
            for head, token in (seen != mask).nonzero().tolist():
                does = "reads" if seen[head, token] else "does not read"
                assert self.reference.tied(layer, head, token), f"{where}: head {head} {does} token {token}"
        others = self.reference.others(layer, seen)
        expected = dense(query, self.reference.keys(layer), self.values[layer], seen, spec, others)
        assert_near(output, expected, self.toy.geometry.dtype, where)

    def _prefill_layer(self, layer: int, ids: list[int], start: int) -> None:
        spec = self.toy.specs[layer]
        q, k, v = self.toy.qkv(layer, ids, start)
        output = self.kv.attention(layer, q, k, v, spec)
        self._keep(layer, k, v)
        self.query[layer] = q[:, -1]
        self._record_queries(layer, q, start)
        for i in {0, len(ids) // 2, len(ids) - 1}:
            positions = torch.arange(start + len(ids))
            mask = (positions <= start + i) & (positions > start + i - (spec.window or start + i + 1))
            every = mask.expand(self.toy.geometry.kv_heads, -1)
            expected = dense(q[:, i], self.keys[layer], self.values[layer], every, spec)
            assert_near(output[:, i], expected, self.toy.geometry.dtype, f"prefill, layer {layer}, token {start + i}")

    # ---- inside

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.keys[layer] = torch.cat((self.keys[layer], k), 1)
        self.values[layer] = torch.cat((self.values[layer], v), 1)

    def _record_queries(self, layer: int, q: Tensor, start: int) -> None:
        """Record the queries of the last prompt tokens in a row; a single token continues a row but starts none."""
        before = self.asked[layer] if start - 1 in self.asked[layer] else {}
        if not before and q.shape[1] == 1:
            return
        asked = before | {start + i: q[:, i] for i in range(q.shape[1])}
        self.asked[layer] = {at: asked[at] for at in sorted(asked)[-ASKED:]}

    def _new_ids(self, n: int) -> list[int]:
        """Return unused ids, so that tokens written after a truncation differ from those before it."""
        count = self.toy.contents[0].shape[2]
        self.fresh += n
        return [i % count for i in range(self.fresh - n, self.fresh)]

    def _make_reference(self) -> None:
        mode = self.kv.mode
        params = mode.report().params
        if params.get("budget"):
            params = params | {"budget": params["budget"] + mode.extra_sinks}
        kind = FreeKVReference if isinstance(mode, FreeKV) else REFERENCES[mode.name]
        self.reference = kind(self, params)
