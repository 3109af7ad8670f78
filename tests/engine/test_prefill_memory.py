"""The forward that measures a prefill's memory."""

from __future__ import annotations

import torch
from support.tiny_runner import loaded

from kvchat.engine.runner import WithoutAttention
from kvchat.models import attention_hook


def test_the_measuring_forward_keeps_nothing_and_runs_through_every_layer():
    model, seen = loaded("deepseek_v3"), []

    class Noting(WithoutAttention):
        def attention(self, layer, query, key, value, spec):
            seen.append((layer, super().attention(layer, query, key, value, spec).shape == (4, 12, value.shape[-1])))
            return super().attention(layer, query, key, value, spec)

    ids = torch.arange(12)
    assert attention_hook.forward(model.model, ids, ids, Noting(), logits=False) is None
    assert seen == [(layer, True) for layer in range(4)]
