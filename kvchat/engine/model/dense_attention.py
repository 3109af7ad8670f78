"""The reference attention of the engine: every key, in float32, without a kernel. Slow, short and exact.

Used where a result has to be right or the weights themselves are wanted, never for answers: the self-test, the check of
fused modules and calibration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.attention_spec import AttentionSpec


def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Causal attention of the newest tokens: the result ``[H_q, n, d_v]`` in the query's dtype, and the weights.

    ``value`` is ``[H, total, d_v]``; the others are those of ``weights``.
    """
    shares = weights(query, key, spec)
    return (shares @ _for_each_query_head(value, query)).to(query.dtype), shares


def weights(query: Tensor, key: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention weights ``[H_q, n, total]`` in float32.

    ``query [H_q, n, d_k]`` belongs to the last n of the ``total`` tokens of ``key [H, total, d_k]``. With learned sinks
    a row sums to less than 1.
    """
    scores = query.float() @ _for_each_query_head(key, query).transpose(1, 2) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(_hidden(scores, spec.window), -torch.inf)
    if spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class DenseManager:
    """An ``AttentionBackend`` that keeps all K/V of one conversation and attends to all of it."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """``query [H_q, n, d_k]`` against everything stored and the new ``key``, ``value [H, n, d]``.

        Raises:
            TypeError: keys and values differ in their dtypes; where K/V are stored they have one.
        """
        if key.dtype != value.dtype:
            raise TypeError(f"keys are {key.dtype}, values {value.dtype}")
        if layer in self._stored:
            keys, values = self._stored[layer]
            key, value = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        self._stored[layer] = key, value
        return attend(query, key, value, spec)[0]


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(len(query) // len(x), 0)


def _hidden(scores: Tensor, window: int | None) -> Tensor:
    """The mask of keys that a query may not see, ``[n, total]``: later ones, and those that have left the window."""
    n, total = scores.shape[1:]
    queries = torch.arange(total - n, total, device=scores.device)[:, None]
    keys = torch.arange(total, device=scores.device)
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)
