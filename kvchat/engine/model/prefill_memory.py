"""Measures the GPU memory that a prefill forward takes beside weights and K/V, once for each loaded model.

It depends on the widths of the layers, on how the model's code keeps intermediate results, on experts and quantized
weights. Two short forwards suffice, because all of it grows in proportion to the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.engine.model import attention_hook
from kvchat.engine.model.load import LoadedModel
from kvchat.kv.attention_spec import AttentionSpec

TOKENS = 1024


class WithoutAttention:
    """An ``AttentionBackend`` without K/V and attention, whose memory is computed and not measured."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Zeros ``[H_q, n, d_v]``."""
        return query.new_zeros((*query.shape[:2], value.shape[-1]))


def bytes_per_token(model: LoadedModel) -> int:
    """Device bytes that a forward takes for each of its tokens, measured by two short forwards on a GPU."""
    high = min(TOKENS, model.context)
    low = high // 4
    low_bytes, high_bytes = _peak(model, low), _peak(model, high)
    return max(0, -(-(high_bytes - low_bytes) // (high - low)))


def _peak(model: LoadedModel, tokens: int) -> int:
    """Bytes at the peak of a forward of ``tokens`` tokens, above what was allocated before."""
    ids = torch.arange(tokens, device=model.device) % model.vocab
    positions = torch.arange(tokens, device=model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    attention_hook.forward(model.model, ids, positions, WithoutAttention(), logits=False)
    return torch.cuda.max_memory_allocated(model.device) - before
