"""append: write the new token's K and V to its slot and to the host pool, and widen its page's bounds by its key.

Cost: one program per KV head. Stores to host memory are posted, so nothing waits for them. For ordered slots the kernel
also finds the token's slot and enters it in the table, which would take torch nine launches per step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.triton.language import HostTensors, host_row, padded, quantized_code


@triton.jit(do_not_specialize=["offset", "ring", "sink", "window"], do_not_specialize_on_alignment=["heads", "table"])
def _append(
    key,
    value,
    slots,
    host,
    codes,
    scales,
    places,
    next_quantized,
    heads,
    table,
    current_slot,
    position,
    n,
    offset,
    ring,
    sink,
    window,
    key_stride,
    value_stride,
    ORDERED: tl.constexpr,
    TABLES: tl.constexpr,
    PICKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    COLS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ITEM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.load(heads + row) if PICKED else row
    col = tl.arange(0, COLS)
    is_key, is_value = col < D_K, col < D_V
    k = tl.load(key + head * key_stride + col, mask=is_key)
    v = tl.load(value + head * value_stride + col, mask=is_value)
    now = tl.load(position)
    if ORDERED:
        place = tl.where(now < sink, offset + now, ring + (now - sink) % window)  # ``DeviceSlots.slot_of``
        if row < TABLES:
            tl.store(table + row * n + place, now.to(tl.int32))
    else:
        place = tl.load(current_slot)
    slot = slots + (row * n + place) * D + col
    tl.store(slot, k, mask=is_key)
    tl.store(slot + tl.num_programs(0).to(tl.int64) * n * D, v, mask=is_value)
    # ``places`` relocates whole pages; a token keeps its offset in the page.
    at = now if ITEM == 0 else tl.load(places + now // PAGE) * PAGE + now % PAGE
    stored = host + host_row(at, head, KV_HEADS, PAGE) * D + col
    tl.store(stored, k, mask=is_key)
    tl.store(stored + PAGE * D, v, mask=is_value)
    if ITEM > 0:  # noqa: SIM102  # constexpr outside, runtime inside
        if now % PAGE == PAGE - 1:
            page = host + host_row(at - now % PAGE, head, KV_HEADS, PAGE) * D
            goal = tl.load(next_quantized) * KV_HEADS + head
            _round_page(page, codes, scales, goal, k, v, is_key, is_value, PAGE, D, COLS, PAGE_ROWS, ITEM)


@triton.jit
def _round_page(
    page,
    codes,
    scales,
    goal,
    k,
    v,
    is_key,
    is_value,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Quantize one head's full-precision ``page``, whose last row is ``k`` and ``v``, to the 8-bit block ``goal``."""
    line, col = tl.arange(0, PAGE_ROWS), tl.arange(0, COLS)
    inside = (line < PAGE)[:, None] & (col < D)[None, :]
    earlier, last = inside & (line < PAGE - 1)[:, None], (line == PAGE - 1)[:, None]
    at = line[:, None] * D + col[None, :]
    # Other threads of this program stored the last row, which may not be visible yet.
    keys = tl.load(page + at, mask=earlier, other=0.0).to(tl.float32)
    values = tl.load(page + PAGE * D + at, mask=earlier, other=0.0).to(tl.float32)
    keys = tl.where(last & is_key[None, :], k.to(tl.float32)[None, :], keys)
    values = tl.where(last & is_value[None, :], v.to(tl.float32)[None, :], values)
    of_keys = (tl.max(tl.abs(keys), 0) / 127.0).to(scales.dtype.element_ty)
    of_values = (tl.max(tl.abs(values), 1) / 127.0).to(scales.dtype.element_ty)
    size: tl.constexpr = 2 * PAGE * D + (D + PAGE) * ITEM
    block = codes + goal * size
    tl.store(block + at, quantized_code(keys, of_keys.to(tl.float32)[None, :]), mask=inside)
    tl.store(block + PAGE * D + at, quantized_code(values, of_values.to(tl.float32)[:, None]), mask=inside)
    scale = scales + goal * (size // ITEM) + 2 * PAGE * D // ITEM
    tl.store(scale + col, of_keys, mask=col < D)
    tl.store(scale + D + line, of_values, mask=line < PAGE)


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
    slots: DeviceSlots,
    host: HostTensors,
    next_quantized: Tensor,
    layer: int,
    position: Tensor,
    key: Tensor,
    value: Tensor,
    g: Geometry,
) -> None:
    """Implement ``TorchOps.append`` for the heads of ``slots``, and ``assign`` for ordered slots.

    Columns that pad a narrower K or V stay unchanged. If the pool has 8-bit pages, the token that fills a page also
    writes block ``next_quantized`` (1-element int64).
    """
    key, value = with_dense_rows(key), with_dense_rows(value)
    heads = slots.heads_of(layer)
    table, layout = slots.table_of(layer), slots.layout
    of_table = not layout.unordered, len(table)
    shape = slots.heads is not None, g.kv_heads, g.page, g.d, g.d_k, g.d_v, padded(g.d), padded(g.page), host.item
    strides = key.stride(0), value.stride(0)
    kv = slots.rows(layer)
    _append[(len(heads),)](
        key,
        value,
        kv,
        *host[:4],
        next_quantized,
        heads,
        table,
        slots.current_slot,
        position,
        slots.n,
        slots.offset,
        slots.ring,
        layout.sink,
        max(1, layout.window),
        *strides,
        *of_table,
        *shape,
        num_warps=4 if host.item else 1,  # a quantized page stays in registers
    )


def update_bounds(bounds: Tensor, page: Tensor, keys: Tensor) -> None:
    """Implement ``TorchOps.update_bounds``."""
    keys = with_dense_rows(keys)
    heads, d_k = keys.shape
    _update_bounds[(heads,)](bounds, page, keys, bounds.shape[1], keys.stride(0), d_k, padded(d_k), num_warps=1)


def with_dense_rows(x: Tensor) -> Tensor:
    """Return ``x [m, d]`` with contiguous rows; the rows may be anywhere."""
    return x if x.stride(1) == 1 else x.contiguous()
