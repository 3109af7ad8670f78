"""Attention over the slots (decode) and over everything stored (prefill): the only softmax of kvchat.

Torch reference. Query heads of one KV head are rows of one matrix, so that a step reads K and V once: on a CPU
``scaled_dot_product_attention(enable_gqa=True)`` takes 6.2 ms a layer for one bfloat16 query over 8,192 tokens,
packed rows take 0.8 ms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.kv.facts import LayerFacts

# Elements of one block of prefill scores: bounds the workspace of layers that no fused kernel serves.
SCORE_BLOCK = 2**24


class Weights:
    """The weights of one token's attention over slots, ``[H, G, n]``."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def best(self) -> Tensor:
        """The highest weight of a group's heads, float32 ``[H, n]``."""
        return self._weights.amax(1)

    def add_shares(self, total: Tensor, counted: Tensor, number: Tensor) -> None:
        """Add to ``total [n]`` the mean over the heads of their weights as shares of an equal one.

        Args:
            total: float32, updated.
            counted: float32, 1 for the slots among which a head's weights are shared out, else 0.
            number: how many these are, 0-d.
        """
        rows = self._weights.flatten(0, 1)
        shares = (rows @ counted).clamp(min=torch.finfo(rows.dtype).tiny)
        total.addmv_(rows.t(), number / len(rows) / shares)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, facts: LayerFacts, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token's attention over slots.

    Args:
        query: ``[H, G, d_k]``.
        keys: ``[H, n, d_k]``, in the slots' order.
        values: ``[H, n, d_v]``.
        bias: ``[H or 1, 1, n]``, 0 where the slot may be read, else -inf.
        facts: scaling and soft cap of the layer.
        sinks: learned sink logits ``[H, G]``, where the layer has them.

    Returns:
        ``[H, G, d_v]`` and the weights ``[H, G, n]`` in float32.
    """
    scores = torch.bmm(query * facts.scaling, keys.transpose(1, 2))
    weights = _softmax(_capped(scores, facts).add_(bias), sinks)
    return torch.bmm(weights.to(values.dtype), values), weights


def attend_prefill(query: Tensor, keys: Tensor, values: Tensor, start: int, facts: LayerFacts) -> Tensor:
    """Exact attention of new tokens over everything stored.

    Args:
        query: ``[H_q, n, d_k]`` of the tokens from position ``start`` on.
        keys: ``[H, start + n, d_k]``, in the order of positions.
        values: ``[H, start + n, d_v]``.
        start: position of the first new token.
        facts: scaling, window, soft cap and learned sinks of the layer.

    Returns:
        ``[H_q, n, d_v]``
    """
    q_heads, n, _ = query.shape
    first = 0 if facts.window is None else max(0, start - facts.window + 1)
    keys, values = keys[:, first:], values[:, first:]
    group = q_heads // keys.shape[0]
    rows = n if _fused(facts) else max(1, SCORE_BLOCK // (q_heads * keys.shape[1]))
    parts = []
    for low in range(0, n, rows):
        block = query[:, low : low + rows]
        m = block.shape[1]
        bias = _causal_bias(start + low, m, first, keys.shape[1], facts.window, query)
        packed = block.reshape(keys.shape[0], group * m, -1)
        attended = _dense(packed, keys, values, bias.repeat(group, 1), facts)
        parts.append(attended.view(q_heads, m, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _dense(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, facts: LayerFacts) -> Tensor:
    if _fused(facts):
        args = query[None], keys[None], values[None], bias[None, None]
        return F.scaled_dot_product_attention(*args, scale=facts.scaling)[0]
    scores = torch.bmm(query, keys.transpose(1, 2)) * facts.scaling
    sinks = None if facts.sinks is None else facts.sinks.view(keys.shape[0], -1)
    repeated = None if sinks is None else sinks.repeat_interleave(query.shape[1] // sinks.shape[1], 1)
    weights = _softmax(_capped(scores, facts) + bias, repeated)
    return torch.bmm(weights.to(values.dtype), values)


def _fused(facts: LayerFacts) -> bool:
    return facts.softcap is None and facts.sinks is None


def _capped(scores: Tensor, facts: LayerFacts) -> Tensor:
    return scores if facts.softcap is None else torch.tanh(scores / facts.softcap) * facts.softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in float32 over ``scores [H, m, n]``; learned sinks ``[H, m]`` are one more logit with no value."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    return torch.cat((scores.float(), sinks.float().unsqueeze(-1)), -1).softmax(-1)[..., :-1]


def _causal_bias(start: int, n: int, first: int, length: int, window: int | None, like: Tensor) -> Tensor:
    """``[n, length]``: queries from position ``start`` on, keys from position ``first`` on."""
    queries = torch.arange(start, start + n, device=like.device)[:, None]
    keys = torch.arange(first, first + length, device=like.device)[None]
    closed = keys > queries
    if window is not None:
        closed |= keys <= queries - window
    return torch.zeros(n, length, dtype=like.dtype, device=like.device).masked_fill_(closed, float("-inf"))
