"""attend: one token's attention over slots, split over programs; a second kernel joins the parts.

The query heads of one KV head are the rows of one tile, so K and V are read once. Slots that may not be read are not
loaded. Exponentials are base 2, all sums float32. Spilled tokens are extra parts, read directly from pinned host
memory; only the device knows their number. The first of them may be staged on the device, and are waited for last. The
CPU may attend to the last of them at the same time; its part is joined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.triton.append import with_dense_rows
from kvchat.kv.ops.triton.language import LOG2E, LOWEST, HostTensors, host_kv, operand, padded
from kvchat.kv.ops.triton.weights import TritonWeights

# Elements per tile of keys or values, by minimum compute capability. Two programs fit a multiprocessor's shared memory
# and registers do not spill. Below 8.0 Triton multiplies without tensor cores, and with heads of 256 only one fits.
TILES = {(0, 0): 4096, (8, 0): 16384, (8, 6): 8192, (9, 0): 16384, (12, 0): 8192}
EIGHT_BIT_TILE = 4096  # both kinds of page are in registers at once, which spill if larger
MOST_SLOTS = 128
PARTS = 32  # joined at a time
NO_LIMIT = 2**31 - 1


@triton.jit
def _logits(q, k, scale, cap, CAPPED: tl.constexpr):
    """Return scaled and capped logits, base 2, ``[GROUP_ROWS, SLOTS]``."""
    logit = tl.dot(q, tl.trans(operand(k))) * scale
    if CAPPED:
        # tanh; above 16 it is 1 in float32.
        logit = (1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(logit, 16.0) * (2.0 * LOG2E)))) * cap
    return logit


@triton.jit
def _folded(logit, v, is_open, highest, total, attended):
    """Add one tile to the online softmax ``highest``, ``total`` and ``attended``."""
    logit = tl.where(is_open[None, :], logit, LOWEST)
    higher = tl.maximum(highest, tl.max(logit, 1))
    weight = tl.where(is_open[None, :], tl.exp2(logit - higher[:, None]), 0.0)
    shrunk = tl.exp2(highest - higher)
    v = operand(v)
    attended = attended * shrunk[:, None] + tl.dot(weight.to(v.dtype), v)
    return higher, total * shrunk + tl.sum(weight, 1), attended


@triton.jit
def _store_part(sums, extremes, index, in_group, highest, total, attended, D_V: tl.constexpr, COLS_V: tl.constexpr):
    """Store the softmax over one part for ``_join``, each query head of the group at its ``index``."""
    col = tl.arange(0, COLS_V)
    inside = in_group[:, None] & (col < D_V)[None, :]
    tl.store(sums + index[:, None] * D_V + col[None, :], attended, mask=inside)
    tl.store(extremes + index * 2, highest, mask=in_group)
    tl.store(extremes + index * 2 + 1, total, mask=in_group)


@triton.jit(do_not_specialize=["blocks", "parts", "window"], do_not_specialize_on_alignment=["heads"])
def _attend_part(
    query,
    slots,
    table,
    read,
    read_pairs,
    position,
    heads,
    logits,
    sums,
    extremes,
    n,
    blocks,
    parts,
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
    """Attend with the group of KV head ``program_id(0)`` to ``blocks * SLOTS`` slots, without dividing by the sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.load(heads + row) if PICKED else row
    now = tl.load(position)
    g = tl.arange(0, GROUP_ROWS)
    col_k, col_v = tl.arange(0, COLS_K), tl.arange(0, COLS_V)
    in_group, in_k, in_v = g[:, None] < GROUP, col_k[None, :] < D_K, col_v[None, :] < D_V
    q = _group_of(query, head * GROUP + g, query_stride, col_k, in_group & in_k)
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
        # If heads share a table, the first one records it.
        if row < TABLES:
            tl.store(read + entries + slot, token, mask=slot < n)
        is_open = token >= 0
        if WINDOWED:
            is_open = is_open & (token > now - window)
        opened += is_open.to(tl.int32)
        k = tl.load(keys + slot[:, None] * D + col_k[None, :], mask=is_open[:, None] & in_k, other=0.0)
        v = tl.load(values + slot[:, None] * D + col_v[None, :], mask=is_open[:, None] & in_v, other=0.0)
        logit = _logits(q, k, scale, cap, CAPPED)
        if WEIGH:
            # Tokens that may not be read have weight 0.
            weighed = tl.where(is_open[None, :], logit, float("-inf"))
            at = logits + (row * GROUP + g)[:, None] * n + slot[None, :]
            tl.store(at, weighed, mask=in_group & (slot < n)[None, :])
        highest, total, attended = _folded(logit, v, is_open, highest, total, attended)
    _store_part(sums, extremes, (row * GROUP + g) * parts + part, g < GROUP, highest, total, attended, D_V, COLS_V)
    if row < TABLES:
        heads_of_table = tl.num_programs(0) // TABLES
        tl.atomic_add(read_pairs, (tl.sum(opened, 0) * heads_of_table).to(tl.int64), sem="relaxed")


@triton.jit
def _group_of(query, rows, stride, col, mask):
    """Return the queries ``rows [G]`` of a KV head's group as an operand."""
    return operand(tl.load(query + rows[:, None] * stride + col[None, :], mask=mask, other=0.0))


@triton.jit(
    do_not_specialize=["first", "parts", "sink", "ring", "limit", "window"], do_not_specialize_on_alignment=["heads"]
)
def _attend_spilled(
    query,
    host,
    codes,
    scales,
    places,
    read_pairs,
    position,
    heads,
    sums,
    extremes,
    first,
    parts,
    sink,
    ring,
    limit,
    window,
    query_stride,
    scale,
    cap,
    PICKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS_K: tl.constexpr,
    COLS_V: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Attend like ``_attend_part``, to host tokens from ``sink`` up to ``limit`` that left a window of ``ring``.

    The numbers of its parts begin at ``first``.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.load(heads + row) if PICKED else row
    now = tl.load(position).to(tl.int32)
    end, begin = tl.minimum(tl.maximum(now - ring + 1, 0), limit), sink
    if WINDOWED:
        begin = tl.maximum(now - window + 1, sink)
    g = tl.arange(0, GROUP_ROWS)
    col_k, col_v = tl.arange(0, COLS_K), tl.arange(0, COLS_V)
    in_group, in_k, in_v = g[:, None] < GROUP, col_k[None, :] < D_K, col_v[None, :] < D_V
    q = _group_of(query, head * GROUP + g, query_stride, col_k, in_group & in_k)
    highest = tl.full((GROUP_ROWS,), LOWEST, tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    attended = tl.zeros((GROUP_ROWS, COLS_V), tl.float32)
    opened = tl.zeros((TOKENS,), tl.int32)
    for block in range(begin // TOKENS + part, tl.cdiv(end, TOKENS), tl.num_programs(1)):
        token = block * TOKENS + tl.arange(0, TOKENS)
        is_open = (token >= begin) & (token < end)
        opened += is_open.to(tl.int32)
        mask_k, mask_v = is_open[:, None] & in_k, is_open[:, None] & in_v
        k, v = host_kv(host, codes, scales, places, token, head, col_k, col_v, mask_k, mask_v, KV_HEADS, PAGE, D, ITEM)
        logit = _logits(q, k, scale, cap, CAPPED)
        highest, total, attended = _folded(logit, v, is_open, highest, total, attended)
    index = (row * GROUP + g) * parts + first + part
    _store_part(sums, extremes, index, g < GROUP, highest, total, attended, D_V, COLS_V)
    tl.atomic_add(read_pairs, tl.sum(opened, 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["heads"])
def _join(
    sums,
    extremes,
    sinks,
    other_part,
    heads,
    attended,
    spread,
    parts,
    SINKS: tl.constexpr,
    OTHER_PART: tl.constexpr,
    PICKED: tl.constexpr,
    GROUP: tl.constexpr,
    D_V: tl.constexpr,
    COLS_V: tl.constexpr,
    PARTS: tl.constexpr,
    IS_PART: tl.constexpr,
):
    """Join the parts of one query head; ``spread`` gets the log-sum-exp (base 2).

    If the result ``IS_PART`` of a larger attention, the natural log-sum-exp follows the sums in ``attended`` instead.
    """
    row = tl.program_id(0)
    col = tl.arange(0, COLS_V)
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    if SINKS:
        head = tl.load(heads + row // GROUP) if PICKED else row // GROUP
        highest = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32) * LOG2E
        total += 1.0
    joined = tl.zeros((COLS_V,), tl.float32)
    if OTHER_PART:
        begun = other_part + row * (D_V + 1)
        summed = tl.load(begun + D_V) * LOG2E
        most = tl.maximum(highest, summed)
        joined = tl.load(begun + col, mask=col < D_V, other=0.0) * tl.exp2(summed - most)
        total = total * tl.exp2(highest - most) + tl.exp2(summed - most)
        highest = most
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
    begun = attended + row.to(tl.int64) * (D_V + IS_PART)
    tl.store(begun + col, result, mask=col < D_V)
    if IS_PART:
        tl.store(begun + D_V, tl.where(highest > LOWEST, (highest + tl.log2(total)) / LOG2E, LOWEST))
    else:
        tl.store(spread + row, highest + tl.log2(total))


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
    host: HostTensors,
) -> tuple[Tensor, Weights | None]:
    """Implement ``TorchOps.attend`` in tiles of ``tile`` elements, split over at most ``programs`` programs.

    A head that may read nothing returns 0. Only slots that spill read ``host``.
    """
    query, heads, kv = with_dense_rows(query), slots.heads_of(layer), slots.rows(layer)
    width, cols_k, cols_v = len(heads), padded(g.d_k), padded(g.d_v)
    block = _tokens_of_a_tile(tile, cols_k, cols_v)
    most = max(1, programs // width)
    blocks, first = _split(slots.n, block, most)
    spills = slots.layout.spills and not slots.recent_only
    staged = slots.staged if spills and slots.staged_layer == layer else 0
    parts = first + most * (spills + (staged > 0))
    other_part = slots.other_part
    rows = width, g.group
    sums = torch.empty((*rows, parts, g.d_v), dtype=torch.float32, device=query.device)
    extremes = sums.new_empty((*rows, parts, 2))
    spread = sums.new_empty(rows)
    logits = sums.new_empty((*rows, slots.n)) if needs_weights else spread
    attended = query.new_empty((*rows, g.d_v))
    table, picked = slots.table_of(layer), slots.heads is not None
    scale, cap = _base_two(spec)
    rule = spec.window or 0, query.stride(0), scale, cap
    has = spec.window is not None, spec.softcap is not None
    sizes = g.group, g.d, g.d_k, g.d_v, padded(g.group)
    _attend_part[width, first](
        query, kv, table, slots.attended_of(layer), slots.read_pairs, position, heads, logits, sums, extremes,
        slots.n, blocks, parts, *rule, picked, *has, needs_weights, len(table), *sizes, block, cols_k, cols_v,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if spills:
        tokens = _tokens_of_a_tile(min(tile, EIGHT_BIT_TILE) if host.item else tile, cols_k, cols_v)
        waits_from, layout = staged * g.page, slots.layout
        ranges = [(host, max(layout.sink, waits_from), slots.on_cpu.start if other_part else NO_LIMIT)]
        if staged:
            rows_staged = slots.staging.view(-1, g.d)
            ranges.append((HostTensors(rows_staged, rows_staged, rows_staged, rows_staged, 0), layout.sink, waits_from))
        for begun, (source, begin, limit) in enumerate(ranges):
            if begun:
                slots.arrived()
            # With both kinds of page, two stages would need more shared memory than most GPUs have.
            _attend_spilled[width, most](
                query, *source[:4], slots.read_pairs, position, heads, sums, extremes,
                first + begun * most, parts, begin, layout.window, limit, *rule, picked, *has,
                g.kv_heads, g.page, *sizes, tokens, cols_k, cols_v, source.item,
                num_warps=4, num_stages=1 if source.item else 2,
            )  # fmt: skip
    sinks = spread if spec.sinks is None else spec.sinks
    on_cpu = other_part() if other_part else spread
    of_heads = spec.sinks is not None, other_part is not None, picked, g.group, g.d_v, cols_v, PARTS, False
    _join[(width * g.group,)](sums, extremes, sinks, on_cpu, heads, attended, spread, parts, *of_heads, num_warps=4)
    return attended, TritonWeights(logits, spread) if needs_weights else None


def join(sums: Tensor, extremes: Tensor) -> Tensor:
    """Join parts into an ``other_part``: ``sums [H, G, part, d_v]`` and ``extremes [H, G, part, 2]``.

    The first extreme is a part's maximum in base 2, ``LOWEST`` if it is empty; the second is its sum of exponentials.
    """
    heads, group, parts, d_v = sums.shape
    joined = sums.new_empty((heads, group, d_v + 1))
    shape = False, False, False, group, d_v, padded(d_v), PARTS, True
    _join[(heads * group,)](sums, extremes, *[joined] * 5, parts, *shape, num_warps=4)
    return joined


def tile_of(device: torch.device) -> int:
    """Return the elements per tile on a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return TILES[max(least for least in TILES if least <= capability)]


def _tokens_of_a_tile(tile: int, cols_k: int, cols_v: int) -> int:
    """Return the tokens whose keys or values fill ``tile`` elements; at least 16, the minimum of a matrix product."""
    return max(16, min(MOST_SLOTS, tile // max(cols_k, cols_v)))


def _split(n: int, block: int, parts: int) -> tuple[int, int]:
    """Split ``n`` slots over at most ``parts`` programs: blocks per program, and programs, none of them idle."""
    blocks = triton.cdiv(n, block)
    each = triton.cdiv(blocks, parts)
    return each, triton.cdiv(blocks, each)


def _base_two(spec: AttentionSpec) -> tuple[float, float]:
    """Return the factor of q·k, and the cap of base-2 logits."""
    if spec.softcap is None:
        return spec.scaling * LOG2E.value, 0.0
    return spec.scaling / spec.softcap, spec.softcap * LOG2E.value
