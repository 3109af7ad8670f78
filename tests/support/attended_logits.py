"""Recomputes the logits of the last step, by dense attention over exactly the tokens that it reports as read."""

from __future__ import annotations

import torch
from support.dense_attention import dense, rotated
from torch import Tensor

from kvchat.engine.runner import ModelRunner
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.models import attention_hook


class DenseOverAttended:
    """An attention backend that stores nothing and reads the host pool."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """``AttentionBackend.attention``"""
        state = self._kv.state
        keys, values = state.host.dense(layer, state.total)
        seen = attended(state, layer)
        if self._kv.mode.name == "streaming":
            keys = self._with_rotated_sinks(layer, keys, seen)
        return dense(query[:, 0], keys, values, seen, spec).to(query.dtype)[:, None]

    def _with_rotated_sinks(self, layer: int, keys: Tensor, seen: Tensor) -> Tensor:
        """The keys as streaming reads them: sinks rotated to directly before the first recent token that it keeps."""
        mode = self._kv.mode
        sinks = min(mode.sink, keys.shape[1])
        first = next((at for at in range(sinks, keys.shape[1]) if seen[:, at].any()), sinks)
        moved, by = keys.double(), torch.full((sinks,), first - sinks, device=keys.device)
        moved[:, :sinks] = rotated(moved[:, :sinks], mode.traits.rotations[layer], by)
        return moved


def logits_over_attended(runner: ModelRunner, token: int) -> Tensor:
    """The logits ``[vocab]`` that the last step, which stored ``token``, should have returned."""
    device = runner.model.device
    ids, position = (torch.tensor([number], device=device) for number in (token, runner.kv.total - 1))
    with torch.inference_mode():
        logits = attention_hook.forward(
            runner.model.model, ids, position, DenseOverAttended(runner.kv), logits=True, state=None
        )
    assert logits is not None
    return logits
