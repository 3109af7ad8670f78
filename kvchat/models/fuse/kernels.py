"""Triton kernels for the projections of one decoded token, and for rotating queries and keys.

A projection of one token reads every weight once and computes almost nothing, so it takes as long as reading. 8-bit
weights are not unpacked: each row's scale multiplies its sum. Small operations (the preceding norm, SiLU, bias, the
residual, rotating heads) are part of the same kernel, because any kernel in a CUDA graph costs about 2 us. All sums are
in float32. Import this module only if Triton is available.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per tile of weights, 8 KiB in half precision. Matrices with few rows are read faster in smaller tiles, which
# give more programs. With such tiles, prototypes on an H200 read 3011 GB/s (4096 x 4096) to 4425 GB/s (128256 x 4096);
# cuBLAS reads 2472 to 4231.
TILE = 4096
FEW_ROWS = 4096
WIDEST = 1024
ROTATED_HEADS = 4


@triton.jit
def _dot(
    x,
    weight,
    scales,
    norm,
    rows,
    n_rows,
    size,
    eps,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute ``weight[rows] @ (rms_norm(x) * norm)`` in one pass over x: the RMS factor is the same for all rows."""
    total = tl.zeros((ROWS, COLS), tl.float32)
    squares = tl.zeros((COLS,), tl.float32)
    at = weight + rows.to(tl.int64)[:, None] * size
    inside = rows[:, None] < n_rows
    for start in range(0, size, COLS):
        cols = start + tl.arange(0, COLS)
        if EVEN:
            part = tl.load(x + cols).to(tl.float32)
            tile = tl.load(at + cols[None, :], mask=inside, other=0.0)
        else:
            part = tl.load(x + cols, mask=cols < size, other=0.0).to(tl.float32)
            tile = tl.load(at + cols[None, :], mask=inside & (cols[None, :] < size), other=0.0)
        if NORM:
            squares += part * part
            part *= tl.load(norm + cols, mask=cols < size, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * part[None, :]
    result = tl.sum(total, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / size + eps)
    if SCALED:
        result *= tl.load(scales + rows, mask=rows < n_rows, other=0.0)
    return result


@triton.jit
def _project(
    x,
    weight,
    scales,
    bias,
    norm,
    residual,
    cos,
    sin,
    out,
    n_rows,
    size,
    turned,
    eps,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    HALF: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Compute ``project``; the first ``turned`` rows are heads of ``2 * HALF`` rows to rotate, none if HALF is 0."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if HALF:  # makes the two rows of each rotated pair adjacent
        within = rows // 2 % HALF + rows % 2 * HALF
        rows = rows // 2 // HALF * (2 * HALF) + within
    result = _dot(x, weight, scales, norm, rows, n_rows, size, eps, SCALED, NORM, EVEN, ROWS, COLS)
    if BIAS:
        result += tl.load(bias + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    if HALF:
        low, high = tl.split(tl.reshape(result, (ROWS // 2, 2)))
        other = tl.reshape(tl.join(-high, low), (ROWS,))
        result *= tl.load(cos + within, mask=rows < turned, other=1.0).to(tl.float32)
        result += other * tl.load(sin + within, mask=rows < turned, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=rows < n_rows)


@triton.jit
def _gated(
    x,
    gate_weight,
    up_weight,
    gate_scales,
    up_scales,
    norm,
    out,
    n_rows,
    size,
    eps,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate = _dot(x, gate_weight, gate_scales, norm, rows, n_rows, size, eps, SCALED, NORM, EVEN, ROWS, COLS)
    up = _dot(x, up_weight, up_scales, norm, rows, n_rows, size, eps, SCALED, NORM, EVEN, ROWS, COLS)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=rows < n_rows)


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    query_norm,
    key_norm,
    query_out,
    key_out,
    q_heads,
    heads,
    q_head_stride,
    q_token_stride,
    k_head_stride,
    k_token_stride,
    tokens,
    half,
    query_eps,
    key_eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate ``HEADS`` heads of one token; query heads come first, then key heads. The outputs are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    col = tl.arange(0, HALF)[None, :]
    is_query = (head < q_heads) & (col < half)
    is_key = (head >= q_heads) & (head < q_heads + heads) & (col < half)
    q_at = head * q_head_stride + token * q_token_stride + col
    k_at = (head - q_heads) * k_head_stride + token * k_token_stride + col
    low = tl.load(query + q_at, mask=is_query, other=0.0) + tl.load(key + k_at, mask=is_key, other=0.0)
    high = tl.load(query + q_at + half, mask=is_query, other=0.0) + tl.load(key + k_at + half, mask=is_key, other=0.0)
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        eps = tl.where(head < q_heads, query_eps, key_eps)
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1)[:, None] / (2 * half) + eps)
        low *= scale * _either(query_norm + col, key_norm + col, is_query, is_key)
        high *= scale * _either(query_norm + half + col, key_norm + half + col, is_query, is_key)
    turn = token * 2 * half + col
    inside = col < half
    cos_low = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + turn + half, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + turn + half, mask=inside, other=0.0).to(tl.float32)
    new_low = (low * cos_low - high * sin_low).to(query_out.dtype.element_ty)
    new_high = (high * cos_high + low * sin_high).to(query_out.dtype.element_ty)
    q_to = (head * tokens + token) * 2 * half + col
    k_to = ((head - q_heads) * tokens + token) * 2 * half + col
    tl.store(query_out + q_to, new_low, mask=is_query)
    tl.store(query_out + q_to + half, new_high, mask=is_query)
    tl.store(key_out + k_to, new_low, mask=is_key)
    tl.store(key_out + k_to + half, new_high, mask=is_key)


@triton.jit
def _either(one, other, is_one, is_other):
    found = tl.load(one, mask=is_one, other=0.0).to(tl.float32)
    return found + tl.load(other, mask=is_other, other=0.0).to(tl.float32)


# ---- launches


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    scales: Tensor | None = None,
    turns: tuple[int, Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute one token's ``weight @ x + bias + residual``; with ``norm``, x is first RMS-normalized and scaled by it.

    ``x`` is ``[..., K]`` with one token, ``weight [N, K]`` (with ``scales [N]`` if it is int8), ``bias [N]``,
    ``norm [K]`` and ``residual [..., N]``, all contiguous; the result is ``[..., N]`` in x's dtype. ``turns`` are the
    number of elements to rotate, which are the first heads of d elements each, and cosines and sines ``[1, 1, d]``.
    """
    n_rows, size = weight.shape
    out = x.new_empty(*x.shape[:-1], n_rows)
    rows, cols = _tile(n_rows, size)
    turned, cos, sin = turns or (0, x, x)
    half = cos.numel() // 2 if turns else 0
    flags = scales is not None, bias is not None, norm is not None, residual is not None, half, size % cols == 0
    operands = (
        weight,
        x if scales is None else scales,
        weight if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        cos,
        sin,
    )
    sizes = n_rows, size, turned, eps
    with _on(x):
        _project[(triton.cdiv(n_rows, rows),)](x, *operands, out, *sizes, *flags, rows, cols, num_warps=4)
    return out


def gated(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 0.0, scales: Tensor | None = None
) -> Tensor:
    """Compute one token's ``silu(gate @ x) * (up @ x)``, with ``x`` normalized first if ``norm [K]`` is given.

    ``x`` is ``[..., K]`` with one token. ``weight [2 N, K]`` is gate's followed by up's, with ``scales [2 N]`` if it is
    int8. All are contiguous; the result is ``[..., N]``.
    """
    n_rows, size = len(weight) // 2, weight.shape[1]
    out = x.new_empty(*x.shape[:-1], n_rows)
    rows, cols = _tile(n_rows, size)
    flags = scales is not None, norm is not None, size % cols == 0
    operands = *weight.chunk(2), *((x, x) if scales is None else scales.chunk(2)), x if norm is None else norm
    with _on(x):
        _gated[(triton.cdiv(n_rows, rows),)](x, *operands, out, n_rows, size, eps, *flags, rows, cols, num_warps=4)
    return out


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, norms: Sequence[tuple[Tensor, float]] = ()
) -> tuple[Tensor, Tensor]:
    """Rotate ``query [1, H_q, n, d]`` and ``key [1, H, n, d]``, pairing the first half of a head with the second.

    ``cos`` and ``sin`` are ``[1, n, d]`` and contiguous; in queries and keys only each head must be. Both results are
    contiguous. With ``norms``, weight ``[d]`` and epsilon for queries and for keys, each head is normalized first.
    """
    q_heads, tokens, size = query.shape[1:]
    heads = key.shape[1]
    new_query, new_key = query.new_empty(query.shape), key.new_empty(key.shape)
    strides = *query.stride()[1:3], *key.stride()[1:3]
    half = size // 2
    grid = tokens, triton.cdiv(q_heads + heads, ROTATED_HEADS)
    (query_norm, query_eps), (key_norm, key_eps) = norms or ((cos, 0.0), (cos, 0.0))
    tensors = query, key, cos, sin, query_norm, key_norm, new_query, new_key
    shape = tokens, half, query_eps, key_eps, len(norms) > 0, ROTATED_HEADS, triton.next_power_of_2(half)
    with _on(query):
        _rotate[grid](*tensors, q_heads, heads, *strides, *shape, num_warps=1)
    return new_query, new_key


def _tile(n_rows: int, size: int) -> tuple[int, int]:
    """Return rows and columns of one tile, with columns that divide the row if possible, so that no mask is needed."""
    cols = next((cols for cols in (WIDEST, WIDEST // 2, WIDEST // 4) if size % cols == 0), WIDEST)
    cols = min(cols, triton.next_power_of_2(size))
    rows = max(1, TILE // cols)
    return (max(1, rows // 2) if n_rows <= FEW_ROWS else rows), cols


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` current: Triton launches on the current device, not on that of its operands."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
