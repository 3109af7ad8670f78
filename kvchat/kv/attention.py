"""Attention over the slots (decode) and over all stored tokens (prefill): the torch reference.

The query heads of a KV head are rows of one matrix, so that a step reads K and V once. On a CPU this takes 0.8 ms per
layer for one bfloat16 query over 8,192 tokens; ``scaled_dot_product_attention(enable_gqa=True)`` takes 6.2 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

# Elements of a block of prefill scores (all heads) and of a mask; these limit the memory of a prefill's attention.
SCORE_BLOCK = 2**24
MASK_BLOCK = 2**22
# At the peak, a block of scores exists in float32, in the model's dtype and twice as an intermediate result.
PREFILL_WORKSPACE = 16 * SCORE_BLOCK
# Maximum number of queries in a block. Larger blocks compute more scores that the mask then drops: on a CPU 256 is as
# fast as any number for a long context and a quarter faster for a short one; a GPU needs more to be busy.
ROWS = {"cpu": 256, "cuda": 1024}
# Up to this many queries SCORES, which reads the keys once per group of heads, is faster on a CPU than a fused kernel:
# 8 queries after 16,000 tokens take 10.5 ms instead of 16.3 (2 KV heads of size 64), or 51 instead of 95 (8 of 128).
FEW = 8


class Kernel(Enum):
    """The attention function of a prefill.

    FLASH takes all tokens at once, without a mask. SPLIT, on a CPU, does this twice, for stored and for new tokens; it
    takes 0.8 of the time of MASKED for a prompt of 8,192 tokens. MASKED is a fused kernel with a mask, run on blocks of
    queries to limit the mask's size. SCORES computes all scores of a block of queries in memory.
    """

    FLASH = "flash"
    SPLIT = "split"
    MASKED = "masked"
    SCORES = "scores"


class Weights:
    """The attention weights of one token over slots, ``[H, G, n]``."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    def best(self) -> Tensor:
        """Return each slot's maximum weight over the heads of a group, float32 ``[H, n]``."""
        return self._weights.amax(1)

    def add_shares(self, total: Tensor, counted: Tensor, number: Tensor) -> None:
        """Add to ``total [n]`` each slot's weight relative to an equal share, averaged over the heads.

        Args:
            total: float32, updated; weights may cover only its first slots.
            counted: float32 ``[n]``, 1 for the slots over which a head's weights are normalized, otherwise 0.
            number: number of these slots, 0-d.
        """
        rows = self._weights.flatten(0, 1)
        n = rows.shape[1]
        shares = (rows @ counted[:n]).clamp(min=torch.finfo(rows.dtype).tiny)
        total[:n].addmv_(rows.t(), number / len(rows) / shares)


class Products(NamedTuple):
    """The two matrix products of one token's attention, with their keys and values bound."""

    scores: Callable[[Tensor], Tensor]  # query [H, G, d_k] -> [H, G, n]
    sums: Callable[[Tensor], Tensor]  # weights, float32 [H, G, n] -> [H, G, d_v]


def products(keys: Tensor, values: Tensor) -> Products:
    """Return the products with ``keys [H, n, d_k]`` and ``values [H, n, d_v]``."""

    def scores(query: Tensor) -> Tensor:
        return torch.bmm(query, keys.transpose(1, 2))

    def sums(weights: Tensor) -> Tensor:
        return torch.bmm(weights.to(values.dtype), values)

    return Products(scores, sums)


def attend(
    query: Tensor,
    products: Products,
    bias: Tensor | None,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    other_part: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one token's attention over slots or over stored tokens.

    Args:
        query: ``[H, G, d_k]``.
        products: with K and V of n tokens, in the order of slots or of positions.
        bias: ``[H or 1, 1, n]``, 0 where the token may be read, otherwise -inf; None if all may be read.
        spec: scaling and soft cap of the layer.
        sinks: learned sink logits ``[H, G]``, if the layer has them.
        other_part: attention to other tokens, if any: ``[H, G, d_v + 1]``, with the log-sum-exp as the last element.

    Returns:
        ``[H, G, d_v]`` and the weights ``[H, G, n]`` in float32.
    """
    scores = capped(products.scores(query * spec.scaling), spec)
    scores = scores if bias is None else scores.add_(bias)
    if other_part is None:
        weights = softmax(scores, sinks)
        return products.sums(weights), weights
    others = other_part[..., -1]
    unseen = others if sinks is None else torch.logaddexp(others, sinks.float())
    weights = softmax(scores, unseen)
    attended, share = products.sums(weights), (1 - weights.sum(-1)) * (others - unseen).exp()
    return (attended.float() + share.unsqueeze(-1) * other_part[..., :-1]).to(attended.dtype), weights


class Partial:
    """One token's attention over keys that arrive in parts (online softmax)."""

    def __init__(self, query: Tensor, d_v: int, spec: AttentionSpec, sinks: Tensor | None = None) -> None:
        """Begin with ``query [H, G, d_k]`` and learned ``sinks [H, G]``, if the layer has them."""
        self._query = query * spec.scaling
        self._spec = spec
        self._sums = query.new_zeros((*query.shape[:2], d_v), dtype=torch.float32)
        self._total = self._sums.new_zeros((*query.shape[:2], 1))
        # Lower than every score, but finite, because the difference of two infinities is NaN.
        self._highest = torch.full_like(self._total, torch.finfo(torch.float32).min / 4)
        if sinks is not None:
            self._highest, self._total = sinks.float().unsqueeze(-1), self._total + 1

    def add(self, keys: Tensor, values: Tensor, bias: Tensor) -> None:
        """Attend also to ``keys [H, n, d_k]`` and ``values [H, n, d_v]``; ``bias`` is as in ``attend``."""
        scores = capped(torch.bmm(self._query, keys.transpose(1, 2)), self._spec).float() + bias.float()
        higher = torch.maximum(self._highest, scores.amax(-1, keepdim=True))
        weights, shrunk = torch.exp(scores - higher), torch.exp(self._highest - higher)
        self._total = self._total * shrunk + weights.sum(-1, keepdim=True)
        self._sums = self._sums * shrunk + torch.bmm(weights.to(values.dtype), values)
        self._highest = higher

    def result(self) -> Tensor:
        """Return ``[H, G, d_v]`` in the query's dtype; 0 where no token could be read."""
        return (self._sums / self._total.clamp(min=torch.finfo(torch.float32).tiny)).to(self._query.dtype)


def attend_prefill(
    query: Tensor, keys: Tensor, values: Tensor, start: int, spec: AttentionSpec, kernel: Kernel | None = None
) -> Tensor:
    """Compute exact attention of new tokens over all stored ones.

    Args:
        query: ``[H_q, n, d_k]`` of the tokens from position ``start`` on.
        keys: ``[H, start + n, d_k]``, in the order of positions.
        values: ``[H, start + n, d_v]``.
        start: position of the first new token.
        spec: scaling, window, soft cap and learned sinks of the layer.
        kernel: by default the fastest that supports the arguments.

    Returns:
        ``[H_q, n, d_v]``. Computing it takes at most ``PREFILL_WORKSPACE`` more bytes, however many tokens there are.
    """
    n = query.shape[1]
    if spec.window is not None and spec.window >= start + n:
        spec = replace(spec, window=None)  # it would mask nothing
    kernel = kernel or _fastest(query, keys, values, spec)
    if kernel in (Kernel.FLASH, Kernel.SPLIT):
        flash = _flash if kernel is Kernel.FLASH else _split
        return flash(query, keys, values, spec.scaling)
    attend_block = _masked if kernel is Kernel.MASKED else _scored
    limit = MASK_BLOCK if kernel is Kernel.MASKED else SCORE_BLOCK // query.shape[0]
    parts, low = [], 0
    while low < n:
        at = start + low
        first = spec.first_seen(at + 1)
        rows = min(n - low, ROWS[query.device.type], _rows(limit, at - first))
        seen = slice(first, at + rows)
        bias = causal_bias(at, rows, first, spec.window, query)
        parts.append(attend_block(query[:, low : low + rows], keys[:, seen], values[:, seen], bias, spec))
        low += rows
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _fastest(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Kernel:
    if spec.softcap is not None or spec.sinks is not None:
        return Kernel.SCORES
    if query.device.type != "cuda":
        if query.shape[1] <= FEW and query.dtype == torch.float32:
            return Kernel.SCORES
        return Kernel.SPLIT if spec.window is None and keys.shape[-1] == values.shape[-1] else Kernel.MASKED
    as_given = SDPAParams(query[None], keys[None], values[None], None, 0.0, False, True)
    if spec.window is None and can_use_flash_attention(as_given):
        return Kernel.FLASH
    grouped = SDPAParams(*_grouped(query, keys, values), None, 0.0, False, False)
    return Kernel.MASKED if can_use_efficient_attention(grouped) else Kernel.SCORES


def _flash(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    # Imported here because it imports torch's compiler, which takes 2 s unless transformers did so already.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    # Not with causal_lower_right(n, total), which allocates 2 * n * total unused numbers.
    bias: Any = torch.empty(0).as_subclass(CausalBias)
    bias.variant, bias.seq_len_q, bias.seq_len_kv = CausalVariant.LOWER_RIGHT, query.shape[1], keys.shape[1]
    args = query[None], keys[None], values[None], bias
    return F.scaled_dot_product_attention(*args, scale=scaling, enable_gqa=True)[0]


def _split(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend to stored and to new tokens separately, and merge both by their log-sum-exp.

    The CPU's kernel supports a causal mask only if queries and keys begin at the same token.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, keys, values = _grouped(query, keys, values)
    start = keys.shape[2] - query.shape[2]
    new: Tensor
    new, new_sum = flash(query, keys[:, :, start:], values[:, :, start:], 0.0, True, scale=scaling)
    if start:
        old, old_sum = flash(query, keys[:, :, :start], values[:, :, :start], 0.0, False, scale=scaling)
        new = torch.lerp(new, old, (old_sum - new_sum).sigmoid().to(new.dtype).unsqueeze(-1))
    return new.flatten(0, 1)


def _masked(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, spec: AttentionSpec) -> Tensor:
    args = *_grouped(query, keys, values), bias[None, None]
    return F.scaled_dot_product_attention(*args, scale=spec.scaling).flatten(0, 1)


def _scored(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, spec: AttentionSpec) -> Tensor:
    heads, (q_heads, n, _) = keys.shape[0], query.shape
    packed = query.reshape(heads, -1, query.shape[-1])
    scores = capped(torch.bmm(packed, keys.transpose(1, 2)).mul_(spec.scaling), spec)
    scores.view(q_heads, n, -1).add_(bias)
    sinks = None if spec.sinks is None else spec.sinks.view(heads, -1).repeat_interleave(n, 1)
    weights = softmax(scores, sinks)
    return torch.bmm(weights.to(values.dtype), values).view(q_heads, n, -1)


def _grouped(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each as ``[H, G, n, d]``, without a copy, so that all heads share one mask.

    ``enable_gqa`` would do the same, but neither the CPU's fused kernel nor the GPU's masked one supports it.
    """
    heads = len(keys)
    group = len(query) // heads
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    return query.view(heads, group, *query.shape[1:]), keys, values


def _rows(limit: int, before: int) -> int:
    """Return the size (at least 1) of a block of queries that has at most ``limit`` scores after ``before`` keys."""
    return max(1, (math.isqrt(before**2 + 4 * limit) - before) // 2)


def capped(scores: Tensor, spec: AttentionSpec) -> Tensor:
    """Apply the layer's soft cap, if any, to ``scores``."""
    return scores if spec.softcap is None else torch.tanh(scores / spec.softcap) * spec.softcap


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the float32 softmax of ``scores [H, m, n]``; learned ``sinks [H, m]`` are one more logit without value."""
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    return torch.cat((scores.float(), sinks.float().unsqueeze(-1)), -1).softmax(-1)[..., :-1]


def causal_bias(start: int, n: int, first: int, window: int | None, like: Tensor) -> Tensor:
    """Return the mask ``[n, start + n - first]`` for queries from position ``start`` and keys from ``first`` on."""
    queries = torch.arange(start, start + n, device=like.device)[:, None]
    keys = torch.arange(first, start + n, device=like.device)[None]
    masked = keys > queries
    if window is not None:
        masked |= keys <= queries - window
    return torch.zeros(masked.shape, dtype=like.dtype, device=like.device).masked_fill_(masked, float("-inf"))


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """One layer's attention rule; compared by identity, because comparing tensors does not give a truth value.

    ``scaling`` multiplies q·k. With a ``window``, a query at position q attends only to positions kv > q - window (and
    kv <= q, as always). ``softcap`` c limits the scaled scores to c·tanh(score / c). ``sinks [H_q]`` are learned logits
    that take part in the softmax but have no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def first_seen(self, tokens: int) -> int:
        """Return the first position that the last of ``tokens`` tokens sees."""
        return 0 if self.window is None else max(0, tokens - self.window)
