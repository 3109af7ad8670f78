"""Shared by the kernels: constants and a few expressions in Triton's language."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool

# The default of older versions: a * b + c is rounded once. If unset, Triton 3.9 warns on the user's terminal.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
# Below every score; finite, because the difference of two infinities is NaN.
LOWEST = tl.constexpr(-1e30)
SMALLEST_DOT = 16


class HostTensors(NamedTuple):
    """One layer of a host pool as the kernels take it.

    ``rows`` are the full-precision pages, ``codes`` the 8-bit pages, ``scales`` the same memory in the model's dtype.
    ``places`` covers all pages. ``item`` is the size of a scale, or 0 without 8-bit pages, when only ``rows`` is used.
    """

    rows: Tensor
    codes: Tensor
    scales: Tensor
    places: Tensor
    item: int


def host_tensors(host: HostPool, layer: int) -> HostTensors:
    """Return the layer's memory as the device addresses it."""
    rows = host.rows(layer)
    if not isinstance(host, EightBitPool):
        return HostTensors(rows, rows, rows, rows, 0)
    blocks, dtype = host.eight_bit.table(layer), host.geometry.dtype
    return HostTensors(rows, blocks.view(torch.int8), blocks.view(dtype), host.places, dtype.itemsize)


def padded(size: int) -> int:
    """Return the block size that holds ``size`` elements and may be an operand of a matrix product."""
    return max(SMALLEST_DOT, int(triton.next_power_of_2(size)))


@triton.jit
def operand(x):
    """Return ``x`` for a matrix product; Triton's interpreter multiplies bfloat16 as integers."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def host_row(position, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Return ``HostPool.row_index``, int64."""
    return ((position // PAGE).to(tl.int64) * KV_HEADS + head) * (2 * PAGE) + position % PAGE


@triton.jit
def host_kv(
    rows,
    codes,
    scales,
    places,
    position,
    head,
    col_k,
    col_v,
    mask_k,
    mask_v,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Load K and V ``[T, cols]`` of tokens ``position [T]`` of one head where masked, unpacking 8-bit pages."""
    if ITEM == 0:
        start = host_row(position, head, KV_HEADS, PAGE)[:, None] * D
        k = tl.load(rows + start + col_k[None, :], mask=mask_k, other=0.0)
        v = tl.load(rows + start + PAGE * D + col_v[None, :], mask=mask_v, other=0.0)
    else:
        asked = tl.max(mask_k.to(tl.int32), 1) > 0
        place = tl.load(places + position // PAGE, mask=asked, other=0)
        offset = position % PAGE
        is_full_precision = (place >= 0)[:, None]
        start = ((place * KV_HEADS + head) * (2 * PAGE) + offset)[:, None] * D
        full_k = tl.load(rows + start + col_k[None, :], mask=mask_k & is_full_precision, other=0.0)
        full_v = tl.load(rows + start + PAGE * D + col_v[None, :], mask=mask_v & is_full_precision, other=0.0)
        in_k, in_v = mask_k & (place < 0)[:, None], mask_v & (place < 0)[:, None]
        block = (-1 - place) * KV_HEADS + head
        size: tl.constexpr = 2 * PAGE * D + (D + PAGE) * ITEM
        at = (block * size + offset * D)[:, None]
        k = tl.load(codes + at + col_k[None, :], mask=in_k, other=0).to(tl.float32)
        v = tl.load(codes + at + PAGE * D + col_v[None, :], mask=in_v, other=0).to(tl.float32)
        scale = scales + block * (size // ITEM) + 2 * PAGE * D // ITEM
        of_keys = tl.load(scale[:, None] + col_k[None, :], mask=in_k, other=0.0).to(tl.float32)
        of_values = tl.load(scale + D + offset, mask=asked & (place < 0), other=0.0).to(tl.float32)
        k = tl.where(is_full_precision, full_k, (k * of_keys).to(full_k.dtype))
        v = tl.where(is_full_precision, full_v, (v * of_values[:, None]).to(full_v.dtype))
    return k, v


@triton.jit
def quantized_code(x, scale):
    """Return the code (int8) of ``x`` under ``scale``, both float32, as ``eight_bit_pages.quantize`` does."""
    code = tl.floor(x / tl.where(scale > 0, scale, 1.0) + 0.5)
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)
