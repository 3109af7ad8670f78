"""append: the new token's K and V to its slot and through to the host pool, and its key into its page's bounds.

Costs: one program a KV head; the stores to host memory are posted, nothing waits for them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.triton.language import host_row, padded


@triton.jit(do_not_specialize_on_alignment=["heads"])
def _append(
    key,
    value,
    slots,
    host,
    heads,
    newest,
    position,
    n,
    key_stride,
    value_stride,
    PICKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.load(heads + row) if PICKED else row
    col = tl.arange(0, COLS)
    is_key, is_value = col < D_K, col < D_V
    k = tl.load(key + head * key_stride + col, mask=is_key)
    v = tl.load(value + head * value_stride + col, mask=is_value)
    slot = slots + (row * n + tl.load(newest)) * D + col
    tl.store(slot, k, mask=is_key)
    tl.store(slot + tl.num_programs(0).to(tl.int64) * n * D, v, mask=is_value)
    stored = host + host_row(tl.load(position), head, KV_HEADS, PAGE) * D + col
    tl.store(stored, k, mask=is_key)
    tl.store(stored + PAGE * D, v, mask=is_value)


@triton.jit(do_not_specialize=["pages"])
def _update_bounds(bounds, page, key, pages, key_stride, D_K: tl.constexpr, COLS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLS)
    inside = col < D_K
    k = tl.load(key + head * key_stride + col, mask=inside, other=0.0).to(tl.float32)
    highest = bounds + (head * pages + tl.load(page)) * (2 * D_K) + col
    lowest = highest + D_K
    high = tl.load(highest, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(lowest, mask=inside, other=0.0).to(tl.float32)
    tl.store(highest, tl.maximum(high, k).to(bounds.dtype.element_ty), mask=inside)
    tl.store(lowest, tl.maximum(low, -k).to(bounds.dtype.element_ty), mask=inside)


def append(
    slots: DeviceSlots, host_rows: Tensor, layer: int, position: Tensor, key: Tensor, value: Tensor, g: Geometry
) -> None:
    """``TorchOps.append`` for the heads of ``slots``; columns that pad a narrower K or V stay as they are."""
    key, value = with_dense_rows(key), with_dense_rows(value)
    heads = slots.heads_of(layer)
    shape = slots.heads is not None, g.kv_heads, g.page, g.d, g.d_k, g.d_v, padded(g.d)
    strides = key.stride(0), value.stride(0)
    kv = slots.rows(layer)
    _append[(len(heads),)](
        key, value, kv, host_rows, heads, slots.current_slot, position, slots.n, *strides, *shape, num_warps=1
    )


def update_bounds(bounds: Tensor, page: Tensor, keys: Tensor) -> None:
    """``TorchOps.update_bounds``"""
    keys = with_dense_rows(keys)
    heads, d_k = keys.shape
    _update_bounds[(heads,)](bounds, page, keys, bounds.shape[1], keys.stride(0), d_k, padded(d_k), num_warps=1)


def with_dense_rows(x: Tensor) -> Tensor:
    """``x [m, d]`` with each row's elements side by side; rows may be anywhere."""
    return x if x.stride(1) == 1 else x.contiguous()
