"""attend: one token's attention over slots, split over programs; a second kernel joins the parts.

The query heads of one KV head are the rows of one tile, so K and V are read once. A slot that may not be read is not
loaded either. Exponentials are base 2, all sums float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.attention import Weights
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.triton.append import with_dense_rows
from kvchat.kv.ops.triton.language import LOG2E, LOWEST, operand, padded

# Elements of one tile of keys or values. It takes 84 KiB of shared memory at most, of which a program gets 99 KiB or
# more from compute capability 8.0 on, and 64 KiB before.
TILE = 16384
SMALL_TILE = 8192
MOST_SLOTS = 128
PARTS = 32  # joined at a time
SUMMED = 2048  # weights of one row that one program sums up
COLUMNS = 128
ROWS = 16


@triton.jit(do_not_specialize=["blocks", "window"], do_not_specialize_on_alignment=["heads"])
def _attend_part(
    query,
    slots,
    table,
    read,
    active,
    position,
    heads,
    logits,
    sums,
    extremes,
    n,
    blocks,
    window,
    query_stride,
    scale,
    cap,
    PICKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGH: tl.constexpr,
    TABLES: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLS_K: tl.constexpr,
    COLS_V: tl.constexpr,
):
    """Attention of the group of KV head ``program_id(0)`` over ``blocks * SLOTS`` slots, not yet divided by its sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.load(heads + row) if PICKED else row
    now = tl.load(position)
    g = tl.arange(0, GROUP_ROWS)
    col_k, col_v = tl.arange(0, COLS_K), tl.arange(0, COLS_V)
    in_group, in_k, in_v = g[:, None] < GROUP, col_k[None, :] < D_K, col_v[None, :] < D_V
    q_at = query + (head * GROUP + g)[:, None] * query_stride + col_k[None, :]
    q = operand(tl.load(q_at, mask=in_group & in_k, other=0.0))
    keys = slots + row * n * D
    values = keys + tl.num_programs(0).to(tl.int64) * n * D
    entries = (row % TABLES) * n
    highest = tl.full((GROUP_ROWS,), LOWEST, tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    attended = tl.zeros((GROUP_ROWS, COLS_V), tl.float32)
    opened = tl.zeros((SLOTS,), tl.int32)
    for block in range(part * blocks, tl.minimum((part + 1) * blocks, tl.cdiv(n, SLOTS))):
        slot = block * SLOTS + tl.arange(0, SLOTS)
        token = tl.load(table + entries + slot, mask=slot < n, other=-1)
        # Where heads share a table the first one notes it.
        if row < TABLES:
            tl.store(read + entries + slot, token, mask=slot < n)
        is_open = token >= 0
        if WINDOWED:
            is_open = is_open & (token > now - window)
        opened += is_open.to(tl.int32)
        k = tl.load(keys + slot[:, None] * D + col_k[None, :], mask=is_open[:, None] & in_k, other=0.0)
        v = tl.load(values + slot[:, None] * D + col_v[None, :], mask=is_open[:, None] & in_v, other=0.0)
        logit = tl.dot(q, tl.trans(operand(k))) * scale
        if CAPPED:
            # tanh; beyond 16 it is 1 in float32.
            logit = (1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(logit, 16.0) * (2.0 * LOG2E)))) * cap
        if WEIGH:
            # Tokens that may not be read weigh nothing.
            weighed = tl.where(is_open[None, :], logit, float("-inf"))
            at = logits + (row * GROUP + g)[:, None] * n + slot[None, :]
            tl.store(at, weighed, mask=in_group & (slot < n)[None, :])
        logit = tl.where(is_open[None, :], logit, LOWEST)
        higher = tl.maximum(highest, tl.max(logit, 1))
        weight = tl.where(is_open[None, :], tl.exp2(logit - higher[:, None]), 0.0)
        shrunk = tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(weight, 1)
        v = operand(v)
        attended = attended * shrunk[:, None] + tl.dot(weight.to(v.dtype), v)
        highest = higher
    index = (row * GROUP + g) * tl.num_programs(1) + part
    tl.store(sums + index[:, None] * D_V + col_v[None, :], attended, mask=in_group & in_v)
    tl.store(extremes + index * 2, highest, mask=g < GROUP)
    tl.store(extremes + index * 2 + 1, total, mask=g < GROUP)
    if row < TABLES:
        heads_of_table = tl.num_programs(0) // TABLES
        tl.atomic_add(active, (tl.sum(opened, 0) * heads_of_table).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["heads"])
def _join(
    sums,
    extremes,
    sinks,
    heads,
    attended,
    spread,
    parts,
    SINKS: tl.constexpr,
    PICKED: tl.constexpr,
    GROUP: tl.constexpr,
    D_V: tl.constexpr,
    COLS_V: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The parts of one query head as one; ``spread`` is the logarithm (base 2) of its sum of exponentials."""
    row = tl.program_id(0)
    col = tl.arange(0, COLS_V)
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    if SINKS:
        head = tl.load(heads + row // GROUP) if PICKED else row // GROUP
        highest = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32) * LOG2E
        total += 1.0
    joined = tl.zeros((COLS_V,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        index = row.to(tl.int64) * parts + part
        high = tl.load(extremes + index * 2, mask=part < parts, other=LOWEST)
        mass = tl.load(extremes + index * 2 + 1, mask=part < parts, other=0.0)
        inside = (part < parts)[:, None] & (col < D_V)[None, :]
        ours = tl.load(sums + index[:, None] * D_V + col[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(high, 0))
        grown = tl.exp2(high - higher)
        shrunk = tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(grown * mass, 0)
        joined = joined * shrunk + tl.sum(ours * grown[:, None], 0)
        highest = higher
    total = tl.where(total > 0, total, 1.0)
    result = (joined / total).to(attended.dtype.element_ty)
    tl.store(attended + row.to(tl.int64) * D_V + col, result, mask=col < D_V)
    tl.store(spread + row, highest + tl.log2(total))


@triton.jit
def _best(logits, spread, best, n, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUP_ROWS)
    slot = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (g < GROUP)[:, None] & (slot < n)[None, :]
    logit = tl.load(logits + (head * GROUP + g)[:, None] * n + slot[None, :], mask=inside, other=float("-inf"))
    sum_of = tl.load(spread + head * GROUP + g, mask=g < GROUP, other=0.0)
    tl.store(best + head * n + slot, tl.max(tl.exp2(logit - sum_of[:, None]), 0), mask=slot < n)


@triton.jit
def _counted_mass(logits, spread, counted, mass, n, SUMMED: tl.constexpr):
    """The counted slots' weight in one part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = part * SUMMED + tl.arange(0, SUMMED)
    logit = tl.load(logits + row * n + slot, mask=slot < n, other=float("-inf"))
    share = tl.exp2(logit - tl.load(spread + row)) * tl.load(counted + slot, mask=slot < n, other=0.0)
    tl.store(mass + row * tl.num_programs(1) + part, tl.sum(share, 0))


@triton.jit(do_not_specialize=["rows", "parts"])
def _add_shares(
    logits, spread, mass, number, total, n, rows, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """All rows of a block of columns, in their order: whoever asks twice gets the same bits."""
    slot = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    equal = tl.load(number).to(tl.float32) / rows
    shares = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        whole = tl.zeros((ROWS,), tl.float32)
        for low in range(0, parts, PARTS):
            part = low + tl.arange(0, PARTS)
            there = (row < rows)[:, None] & (part < parts)[None, :]
            whole += tl.sum(tl.load(mass + row[:, None] * parts + part[None, :], mask=there, other=0.0), 1)
        there = (row < rows)[:, None] & (slot < n)[None, :]
        logit = tl.load(logits + row.to(tl.int64)[:, None] * n + slot[None, :], mask=there, other=float("-inf"))
        weight = tl.exp2(logit - tl.load(spread + row, mask=row < rows, other=0.0)[:, None])
        # The smallest normal float32: a row that reads nothing that counts has no shares.
        shares += tl.sum(weight / tl.maximum(whole, 1.1754943508222875e-38)[:, None], 0)
    before = tl.load(total + slot, mask=slot < n, other=0.0)
    tl.store(total + slot, before + shares * equal, mask=slot < n)


class TritonWeights(Weights):
    """``Weights`` kept as logits ``[H, G, n]`` and the logarithms ``spread [H, G]`` of their sums, both base 2."""

    def __init__(self, logits: Tensor, spread: Tensor) -> None:
        self._logits = logits
        self._spread = spread

    def best(self) -> Tensor:
        """``Weights.best``"""
        heads, group, n = self._logits.shape
        best = self._logits.new_empty(heads, n)
        grid = heads, triton.cdiv(n, COLUMNS)
        shape = group, triton.next_power_of_2(group), COLUMNS
        with torch.cuda.device_of(best):
            _best[grid](self._logits, self._spread, best, n, *shape, num_warps=4)
        return best

    def add_shares(self, total: Tensor, counted: Tensor, number: Tensor) -> None:
        """``Weights.add_shares``"""
        heads, group, n = self._logits.shape
        rows, parts = heads * group, triton.cdiv(n, SUMMED)
        mass = self._logits.new_empty(rows, parts)
        sizes = n, rows, parts, ROWS, COLUMNS, PARTS
        with torch.cuda.device_of(mass):
            _counted_mass[(rows, parts)](self._logits, self._spread, counted, mass, n, SUMMED, num_warps=4)
            grid = (triton.cdiv(n, COLUMNS),)
            _add_shares[grid](self._logits, self._spread, mass, number, total, *sizes, num_warps=4)


def attend(
    slots: DeviceSlots,
    layer: int,
    position: Tensor,
    query: Tensor,
    spec: AttentionSpec,
    needs_weights: bool,
    g: Geometry,
    programs: int,
    tile: int,
) -> tuple[Tensor, Weights | None]:
    """``TorchOps.attend`` in tiles of ``tile`` elements, split over at most ``programs`` programs.

    A head that may read nothing attends to nothing: 0.
    """
    query, heads, kv = with_dense_rows(query), slots.heads_of(layer), slots.rows(layer)
    width, cols_k, cols_v = len(heads), padded(g.d_k), padded(g.d_v)
    block = max(16, min(MOST_SLOTS, tile // max(cols_k, cols_v)))
    blocks, parts = _split(slots.n, block, max(1, programs // width))
    rows = width, g.group
    sums = torch.empty((*rows, parts, g.d_v), dtype=torch.float32, device=query.device)
    extremes = sums.new_empty((*rows, parts, 2))
    spread = sums.new_empty(rows)
    logits = sums.new_empty((*rows, slots.n)) if needs_weights else spread
    attended = query.new_empty((*rows, g.d_v))
    table, picked = slots.table_of(layer), slots.heads is not None
    scale, cap = _base_two(spec)
    _attend_part[width, parts](
        query, kv, table, slots.attended_of(layer), slots.active, position, heads, logits, sums, extremes,
        slots.n, blocks, spec.window or 0, query.stride(0), scale, cap,
        picked, spec.window is not None, spec.softcap is not None, needs_weights, len(table),
        g.group, g.d, g.d_k, g.d_v, padded(g.group), block, cols_k, cols_v,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    sinks = spread if spec.sinks is None else spec.sinks
    of_heads = spec.sinks is not None, picked, g.group, g.d_v, cols_v, PARTS
    _join[(width * g.group,)](sums, extremes, sinks, heads, attended, spread, parts, *of_heads, num_warps=4)
    return attended, TritonWeights(logits, spread) if needs_weights else None


def tile_of(device: torch.device) -> int:
    """Elements of one tile that fit a device's shared memory."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return SMALL_TILE if old else TILE


def _split(n: int, block: int, parts: int) -> tuple[int, int]:
    """``n`` slots over at most ``parts`` programs: blocks of one program, and programs, none of them idle."""
    blocks = triton.cdiv(n, block)
    each = triton.cdiv(blocks, parts)
    return each, triton.cdiv(blocks, each)


def _base_two(spec: AttentionSpec) -> tuple[float, float]:
    """The factor of q·k, and the cap of the logits that are powers of 2."""
    if spec.softcap is None:
        return spec.scaling * LOG2E.value, 0.0
    return spec.scaling / spec.softcap, spec.softcap * LOG2E.value
