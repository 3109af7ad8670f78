"""What torch computes differently on a GPU: attention (the choice of kernel, padding, copies), norms, 4-bit products,
histograms of integers."""

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


def _rms_norm(x, shape, weight, eps) -> tuple:
    """RMS norm by one kernel, in float32."""
    return torch.rms_norm(x.float(), shape, None if weight is None else weight.float(), eps).to(x.dtype), None


def _histc(x, bins=100, min=0, max=0) -> torch.Tensor:
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


TILE = 8, 128  # rows and columns of 4 bits; the order inside is our own
LEVELS = 16


def _packed_tiles(levels, tiles) -> torch.Tensor:
    """``levels [N, K / 2]``, two in a byte, as ``[N / 8, K / 128, 32, 4]`` in int32."""
    rows, columns = len(levels) // TILE[0], 2 * levels.shape[1] // TILE[1]
    split = levels.view(rows, TILE[0], columns, -1).transpose(1, 2)
    return split.reshape(rows, columns, -1).view(torch.int32).view(rows, columns, 32, tiles // 2)


def _product_of_tiles(x, packed, group, scales) -> torch.Tensor:
    """``x [n, K]`` through packed tiles; each ``group`` of a row has a scale and the value of its middle level."""
    rows, columns = TILE[0] * packed.shape[0], TILE[1] * packed.shape[1]
    assert x.dtype == scales.dtype == torch.bfloat16
    assert x.shape[1] == columns
    assert scales.shape == (columns // group, rows, 2)
    assert all(each.is_contiguous() for each in (x, packed, scales))
    split = packed.view(*packed.shape[:2], -1).view(torch.uint8).view(*packed.shape[:2], TILE[0], -1)
    levels = split.transpose(1, 2).reshape(rows, -1)
    levels = torch.stack([levels >> 4, levels & 15], -1).view(rows, -1, group).float() - LEVELS // 2
    scale, middle = scales.float().permute(2, 1, 0).unsqueeze(-1)
    return (x.float() @ (levels * scale + middle).view(rows, columns).T).to(x.dtype)


REPLACED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_softmax": _softmax,
    "histc": _histc,
    "_fused_rms_norm": _rms_norm,
    "_convert_weight_to_int4pack": _packed_tiles,
    "_weight_int4pack_mm": _product_of_tiles,
}
