"""recall: copy from the host pool to slots, with programs that read pinned host memory directly.

A few programs saturate the link; more would only take resources from the model's own kernels, so their number is
measured (``calibrate_ctas``). Unchanged pages are not read, and the host never learns how many change.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots
from kvchat.kv.ops.triton.language import HostTensors, host_kv, padded

# Elements of K, and as many of V, that a program has in flight: 16 KiB of half precision.
PIECE = 4096
# A row is smaller than a page and few rows of a tile change, so a program has less in flight.
TOKENS = 32
TOKEN_CTAS = 8
CTAS = (1, 2, 4, 8, 16, 32)
DEFAULT_CTAS = 16
ENOUGH = 0.95  # of the best rate
MEASURED_PAGES = 512  # 8 MiB: 1 ms for one program at 8.5 GB/s


@triton.jit(do_not_specialize=["pairs", "k", "n"], do_not_specialize_on_alignment=["heads", "counters"])
def _move_pages(
    host,
    codes,
    scales,
    places,
    slots,
    placed,
    resident,
    heads,
    counters,
    pairs,
    k,
    n,
    PICKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PIECE: tl.constexpr,
    COLS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Copy a share of the pages that move; every program computes which these are."""
    pair = tl.arange(0, PAIRS)
    new = tl.load(placed + pair, mask=pair < pairs, other=-1)
    old = tl.load(resident + pair, mask=pair < pairs, other=-1)
    changed = ((new != old) & (new >= 0)).to(tl.int32)
    upto = tl.cumsum(changed, 0)
    moved = tl.sum(changed, 0)
    if tl.program_id(0) == 0:
        _count_pages(counters, places, new, changed, moved, PAGE, ITEM)
    v_rows = (pairs // k).to(tl.int64) * n
    if ITEM > 0:
        for item in range(tl.program_id(0), moved, tl.num_programs(0)):
            which, row, head = _moved_pair(upto, item, heads, k, PICKED)
            line = tl.arange(0, PAGE_ROWS)
            position = tl.load(placed + which).to(tl.int64) * PAGE + line
            target = (row.to(tl.int64) * (n // PAGE) + which % k) * PAGE + line
            _copy_tokens(
                host, codes, scales, places, slots, position, head.to(tl.int64), target, v_rows, line < PAGE,
                KV_HEADS, PAGE, D, COLS, ITEM,
            )  # fmt: skip
    else:
        v_slots = slots + v_rows * D
        pieces: tl.constexpr = (PAGE * D + PIECE - 1) // PIECE
        for item in range(tl.program_id(0), moved * pieces, tl.num_programs(0)):
            which, row, head = _moved_pair(upto, item // pieces, heads, k, PICKED)
            source = (tl.load(placed + which).to(tl.int64) * KV_HEADS + head) * (2 * PAGE * D)
            target = (row.to(tl.int64) * (n // PAGE) + which % k) * (PAGE * D)
            _copy_piece(host + source, slots + target, v_slots + target, item % pieces, PAGE * D, PIECE)


@triton.jit
def _count_pages(counters, places, new, changed, moved, PAGE: tl.constexpr, ITEM: tl.constexpr):
    """Count the tokens of the pages that move, that are wanted, and that move from 8-bit pages."""
    wanted = tl.sum((new >= 0).to(tl.int32), 0)
    tl.atomic_add(counters, (moved * PAGE).to(tl.int64), sem="relaxed")
    tl.atomic_add(counters + 1, (wanted * PAGE).to(tl.int64), sem="relaxed")
    if ITEM > 0:
        of_new = tl.load(places + new, mask=changed > 0, other=0)
        tl.atomic_add(counters + 2, tl.sum((of_new < 0).to(tl.int64) * PAGE, 0), sem="relaxed")


@triton.jit
def _moved_pair(upto, number, heads, k, PICKED: tl.constexpr):
    """Return the changed pair that follows ``number`` others, its row of slots and that row's KV head."""
    which = tl.sum((upto <= number).to(tl.int32), 0)
    row = which // k
    return which, row, tl.load(heads + row) if PICKED else row


@triton.jit
def _copy_piece(page, keys, values, piece, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """Copy one piece of a full-precision page: ``SIZE`` elements of K, followed by as many of V."""
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = at < SIZE
    k, v = tl.load(page + at, mask=inside), tl.load(page + SIZE + at, mask=inside)
    tl.store(keys + at, k, mask=inside)
    tl.store(values + at, v, mask=inside)


@triton.jit
def _copy_tokens(
    host,
    codes,
    scales,
    places,
    slots,
    position,
    head,
    target,
    v_rows,
    moves,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Copy K and V of tokens ``position [m]`` of one head to rows ``target [m]`` where it ``moves [m]``."""
    col = tl.arange(0, COLS)
    goal = slots + target[:, None] * D + col[None, :]
    mask = moves[:, None] & (col < D)[None, :]
    keys, values = host_kv(host, codes, scales, places, position, head, col, col, mask, mask, KV_HEADS, PAGE, D, ITEM)
    tl.store(goal, keys, mask=mask)
    tl.store(goal + v_rows * D, values, mask=mask)


@triton.jit(
    do_not_specialize=["width", "length", "resident_stride", "n", "first"],
    do_not_specialize_on_alignment=["resident", "heads", "counters"],
)
def _move_tokens(
    host,
    codes,
    scales,
    places,
    slots,
    placed,
    resident,
    heads,
    counters,
    width,
    length,
    resident_stride,
    n,
    first,
    PICKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITEM: tl.constexpr,
):
    moved = tl.zeros((TOKENS,), tl.int32)
    wanted = tl.zeros((TOKENS,), tl.int32)
    quantized = tl.zeros((TOKENS,), tl.int32)
    tiles = tl.cdiv(length, TOKENS)
    for tile in range(tl.program_id(0), width * tiles, tl.num_programs(0)):
        row = (tile // tiles).to(tl.int64)
        index = (tile % tiles) * TOKENS + tl.arange(0, TOKENS)
        new = tl.load(placed + row * length + index, mask=index < length, other=-1)
        old = tl.load(resident + row * resident_stride + index, mask=index < length, other=-1)
        tl.store(resident + row * resident_stride + index, new.to(resident.dtype.element_ty), mask=index < length)
        moves = (new != old) & (new >= 0)
        head = tl.load(heads + row) if PICKED else row
        target = row * n + first + index
        v_rows = width.to(tl.int64) * n
        _copy_tokens(
            host, codes, scales, places, slots, new, head, target, v_rows, moves, KV_HEADS, PAGE, D, COLS, ITEM
        )
        moved += moves.to(tl.int32)
        if ITEM > 0:
            quantized += (tl.load(places + new // PAGE, mask=moves, other=0) < 0).to(tl.int32)
        wanted += (new >= 0).to(tl.int32)
    tl.atomic_add(counters, tl.sum(moved, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(counters + 1, tl.sum(wanted, 0).to(tl.int64), sem="relaxed")
    if ITEM > 0:
        tl.atomic_add(counters + 2, tl.sum(quantized, 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["m", "n"], do_not_specialize_on_alignment=["heads"])
def _move_shared(
    host,
    codes,
    scales,
    places,
    slots,
    positions,
    targets,
    taken,
    heads,
    m,
    n,
    PICKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    COLS: tl.constexpr,
    TOKENS: tl.constexpr,
    ITEM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    moves = tl.load(taken + index, mask=index < m, other=0) != 0
    position = tl.load(positions + index, mask=moves, other=0)
    target = row * n + tl.load(targets + index, mask=moves, other=0)
    head = tl.load(heads + row) if PICKED else row
    v_rows = tl.num_programs(0).to(tl.int64) * n
    _copy_tokens(
        host, codes, scales, places, slots, position, head, target, v_rows, moves, KV_HEADS, PAGE, D, COLS, ITEM
    )


def move_pages(
    host: HostTensors, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, counters: Tensor, ctas: int
) -> None:
    """Implement ``TorchOps.move_pages`` with ``ctas`` programs."""
    placed, resident, g = placed.contiguous(), resident.contiguous(), slots.geometry
    pairs = placed.numel()
    shape = slots.heads is not None, g.kv_heads, g.page, g.d, padded(pairs), *_page_shape(g.page, g.d), host.item
    tensors = *host[:4], slots.blocks(layer), placed, resident, slots.heads_of(layer), counters
    if pairs:
        # With 8-bit pages ptxas would spill values rather than use a 57th register, and with at most 72 it spills too.
        registers = 128 if host.item and padded(g.d) <= 64 else None
        _move_pages[(ctas,)](*tensors, pairs, placed.shape[1], slots.n, *shape, num_warps=4, maxnreg=registers)


def move_tokens(
    host: HostTensors,
    slots: DeviceSlots,
    layer: int,
    first: int,
    placed: Tensor,
    resident: Tensor,
    counters: Tensor,
    ctas: int,
) -> None:
    """Implement ``TorchOps.move_tokens`` with up to ``TOKEN_CTAS`` times ``ctas`` programs."""
    placed, g = placed.contiguous(), slots.geometry
    width, length = placed.shape
    grid = (min(TOKEN_CTAS * ctas, width * triton.cdiv(length, TOKENS)),)
    tensors = *host[:4], slots.rows(layer), placed, resident, slots.heads_of(layer), counters
    if placed.numel():
        sizes = width, length, resident.stride(0), slots.n, first
        _move_tokens[grid](*tensors, *sizes, *_token_shape(slots, g), host.item, num_warps=4)


def move_shared(
    host: HostTensors, slots: DeviceSlots, layer: int, positions: Tensor, targets: Tensor, taken: Tensor
) -> None:
    """Implement ``TorchOps.move_shared`` for one layer."""
    m, heads, g = len(positions), slots.heads_of(layer), slots.geometry
    tensors = *host[:4], slots.rows(layer), positions, targets, taken.view(torch.uint8), heads
    if m:
        grid = len(heads), triton.cdiv(m, TOKENS)
        _move_shared[grid](*tensors, m, slots.n, *_token_shape(slots, g), host.item, num_warps=4)


def _token_shape(slots: DeviceSlots, g: Geometry) -> tuple[bool, int, int, int, int, int]:
    return slots.heads is not None, g.kv_heads, g.page, g.d, padded(g.d), TOKENS


def _page_shape(page: int, d: int) -> tuple[int, int, int]:
    return min(PIECE, padded(page * d)), padded(d), padded(page)


# ---- number of programs


def recall_rates(source: Tensor, target: Tensor) -> dict[int, float]:
    """Measure bytes/s that ``move_pages`` copies from host memory, by number of programs; takes a few milliseconds.

    ``source [pages, 2, p, d]`` has pages of one KV head in host memory as the device sees it;
    ``target [2, pages, p, d]`` has as many slots. Synchronizes with the device.
    """
    pages, _, p, d = source.shape
    placed = torch.arange(pages, device=target.device)
    resident = torch.full_like(placed, EMPTY)
    counters = torch.zeros(2, dtype=torch.int64, device=target.device)
    shape = False, 1, p, d, padded(pages), *_page_shape(p, d), 0

    def move(ctas: int) -> None:
        tensors = *[source] * 4, target, placed, resident, placed, counters
        _move_pages[(ctas,)](*tensors, pages, pages, pages * p, *shape, num_warps=4)

    move(max(CTAS))
    return {ctas: source.nbytes / _seconds(functools.partial(move, ctas)) for ctas in CTAS}


def calibrate_ctas(rates: dict[int, float]) -> int:
    """Return the lowest number of programs that reaches ``ENOUGH`` of the best rate."""
    return min(ctas for ctas, rate in rates.items() if rate >= ENOUGH * max(rates.values()))


@functools.cache
def measured_ctas(device: torch.device) -> int:
    """Run ``calibrate_ctas`` once for a CUDA device; return ``DEFAULT_CTAS`` if host memory cannot be pinned."""
    shape = MEASURED_PAGES, 2, 32, 128
    try:
        source = torch.empty(shape, dtype=torch.float16, pin_memory=True)
    except RuntimeError:
        return DEFAULT_CTAS
    target = torch.empty(source.numel(), dtype=torch.float16, device=device)
    with torch.cuda.device(device):
        return calibrate_ctas(recall_rates(source, target))


def _seconds(work: functools.partial[None]) -> float:
    """Return the seconds that ``work`` takes on the device, the better of two runs."""
    times: list[float] = []
    for _ in range(2):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times)
