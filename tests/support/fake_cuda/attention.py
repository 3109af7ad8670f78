"""Fused attention as torch runs it on a GPU: the choice of kernel, its padding and copies, its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

HALVES = (torch.bfloat16, torch.float16)


def _flash(query, key, value, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> tuple:
    """FlashAttention's results: computed in float32, causal mask aligned to the last key, grouped KV heads allowed."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        masked = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + key.shape[-2] - query.shape[-2])
        scores.masked_fill_(masked, -torch.inf)
    output = (scores.softmax(-1) @ value).to(query.dtype)
    # The kernel's memory layout: heads inside tokens.
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return output, scores.logsumexp(-1), None, None, query.shape[-2], key.shape[-2], None, None, None


def _efficient(query, key, value, bias, with_sums, dropout=0.0, is_causal=False, *, scale=None) -> tuple:
    """Results of the memory-efficient kernel: computed in float32, one KV head for every query head."""
    scores = query.float() @ key.float().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores += bias.float()
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1), None, None


def fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Any:
    """``scaled_dot_product_attention`` by one of the two kernels; None if neither supports the operands."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and query.dtype in HALVES:
        size = query.shape[-1]
        query, key, value = (pad(x, (0, -size % 8)) for x in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0][..., :size]
    if enable_gqa or query.shape[1] != key.shape[1] or query.shape[-1] % 4 or value.shape[-1] % 4:
        return None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        keys = key.shape[-2]
        attn_mask = pad(attn_mask, (0, -keys % 16))[..., :keys]
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[-2], keys)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]


def may_flash(params: Any, debug: bool = False) -> bool:
    return params.query.dtype in HALVES and params.attn_mask is None and params.query.shape[-1] <= 256


def may_be_efficient(params: Any, debug: bool = False) -> bool:
    return params.query.shape[1] == params.key.shape[1] and params.query.shape[-1] % 4 == 0


def _softmax(x, dim, half_to_float) -> Any:
    """Softmax in float32 of half-precision input, which torch supports on CUDA only."""
    return torch.ops.aten._softmax.default(x.float() if half_to_float else x, dim, False)


REPLACED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_softmax": _softmax,
}
