"""select: find queries that changed direction, choose each KV head's next pages, assign their slots, open their tokens.

The best pages are found without sorting. Weights are nonnegative, so their bits have the same order, and a binary
search over bits finds the k-th. There is one program per KV head, which does not pay above ``MOST_PAGES``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.ops.selection import Candidates
from kvchat.kv.ops.triton.append import with_dense_rows
from kvchat.kv.ops.triton.language import LOWEST, padded

LEAST_PAGES = 1024  # the kernel is compiled for this many, and again at each doubling
MOST_PAGES = 8192
MOST_CHOSEN = 128
SCORED_PAGES = 32
OPENED = 256


@triton.jit(do_not_specialize=["pages"])
def _page_scores(
    query,
    bounds,
    scores,
    pages,
    query_stride,
    scaling,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    COLS: tl.constexpr,
    PAGES: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    col = tl.arange(0, COLS)
    inside = (page < pages)[:, None] & (col < D_K)[None, :]
    highest = bounds + (head * pages + page)[:, None] * (2 * D_K) + col[None, :]
    # An empty page's bounds are the lowest float, and their product with a query would be infinite.
    high = tl.maximum(tl.load(highest, mask=inside, other=0.0).to(tl.float32), LOWEST)
    low = tl.maximum(tl.load(highest + D_K, mask=inside, other=0.0).to(tl.float32), LOWEST)
    for g in range(GROUP):
        q = tl.load(query + (head * GROUP + g) * query_stride + col, mask=col < D_K, other=0.0).to(tl.float32)
        bound = high * tl.maximum(q, 0.0)[None, :] + low * tl.maximum(-q, 0.0)[None, :]
        tl.store(scores + (head * GROUP + g) * pages + page, tl.sum(bound, 1) * scaling, mask=page < pages)


@triton.jit
def _needs_correction(
    query,
    before,
    flags,
    query_stride,
    before_stride,
    tau,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    head = tl.program_id(0)
    g, col = tl.arange(0, GROUP_ROWS), tl.arange(0, COLS)
    inside = (g < GROUP)[:, None] & (col < D_K)[None, :]
    row = (head * GROUP + g)[:, None]
    a = tl.load(query + row * query_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(before + row * before_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    norms = tl.sqrt(tl.sum(a * a, 1)) * tl.sqrt(tl.sum(b * b, 1))
    cosine = tl.sum(a * b, 1) / tl.maximum(norms, 1.1754943508222875e-38)
    tl.store(flags + head, (tl.sum(cosine, 0) / GROUP < tau).to(tl.uint8))


@triton.jit(do_not_specialize=["first", "pages", "k"])
def _choose(
    scores,
    first,
    last,
    resident,
    flagged,
    best,
    chosen,
    pages,
    k,
    FLAGGED: tl.constexpr,
    GROUP: tl.constexpr,
    PAGES: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, CHOSEN)
    held = tl.load(resident + head * k + slot, mask=slot < k, other=-1).to(tl.int32)
    meant = True
    if FLAGGED:
        meant = tl.load(flagged + head) != 0
    if meant:
        page = tl.arange(0, PAGES)
        candidate = (page < pages) & (page >= first) & (page <= tl.load(last))
        weight = _mean_weight(scores + head * GROUP * pages, candidate, page, pages, GROUP)
        # Weights are nonnegative, so their bits have the same order.
        taken = top(tl.where(candidate, weight.to(tl.int32, bitcast=True), -1), k)
        order = tl.cumsum(taken, 0)
        tl.store(best + head * k + order - 1, page, mask=taken > 0)
        # Threads read entries that other threads wrote.
        tl.debug_barrier()
        wanted = tl.load(best + head * k + slot, mask=slot < tl.sum(taken, 0), other=-1)
        held = _assigned(wanted, held, slot < k)
    tl.store(chosen + head * k + slot, held.to(tl.int64), mask=slot < k)


@triton.jit
def _mean_weight(scores, candidate, page, pages, GROUP: tl.constexpr):
    """Return the softmax over the candidates, averaged over the group; 0 or NaN elsewhere."""
    weight = tl.zeros(page.shape, tl.float32)
    for g in range(GROUP):
        score = tl.load(scores + g * pages + page, mask=candidate, other=LOWEST).to(tl.float32)
        share = tl.where(candidate, tl.exp(score - tl.max(score, 0)), 0.0)
        weight += share / (tl.maximum(tl.sum(share, 0), 1e-30) * GROUP)
    return weight


@triton.jit
def top(bits, k):
    """Return 1 for the ``k`` highest nonnegative ``bits``, or for all if fewer; among equal ones the first win.

    They are bits of numbers from 0 to below 2. Each step finds two bits of the k-th: one sum counts how many reach each
    of three bounds. The search ends when exactly ``k`` reach the bound, usually long before the last bits.
    """
    bound = tl.zeros((), tl.int32)
    shift = tl.full((), 28, tl.int32)
    count = tl.sum((bits >= 0).to(tl.int32), 0)
    while (shift >= 0) & (count > k):
        digit = (bits - bound) >> shift
        counts = tl.sum((digit > 0).to(tl.int32) + ((digit > 1).to(tl.int32) << 16), 0)
        one, two, three = counts & 0xFFFF, (counts >> 16) & 0xFFFF, tl.sum((digit > 2).to(tl.int32), 0)
        bound += ((one >= k).to(tl.int32) + (two >= k).to(tl.int32) + (three >= k).to(tl.int32)) << shift
        count = tl.where(three >= k, three, tl.where(two >= k, two, tl.where(one >= k, one, count)))
        shift -= 2
    at = (bits == bound).to(tl.int32)
    room = k - tl.sum((bits > bound).to(tl.int32), 0)
    return (bits > bound).to(tl.int32) + tl.where(tl.cumsum(at, 0) <= room, at, 0)


@triton.jit
def _assigned(wanted, held, is_slot):
    """Compute ``selection.assign_slots``: wanted pages stay, the i-th missing page gets the i-th free slot."""
    same = ((wanted[:, None] == held[None, :]) & (wanted >= 0)[:, None]).to(tl.int32)
    missing = ((wanted >= 0) & (tl.max(same, 1) == 0)).to(tl.int32)
    free = (is_slot & (tl.max(same, 0) == 0)).to(tl.int32)
    of_missing = tl.where(missing > 0, tl.cumsum(missing, 0), -1)
    of_free = tl.where(free > 0, tl.cumsum(free, 0), 0)
    meet = of_missing[:, None] == of_free[None, :]
    incoming = tl.sum(tl.where(meet, wanted[:, None] + 1, 0), 0) - 1
    return tl.where(free > 0, incoming, held)


@triton.jit(do_not_specialize=["k", "n", "first"])
def _open_pages(table, pages, last, k, n, first, PAGE: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < k * PAGE
    page = tl.load(pages + row * k + slot // PAGE, mask=inside, other=-1)
    token = page * PAGE + slot % PAGE
    is_open = (page >= 0) & (token >= first) & (token <= tl.load(last))
    tl.store(table + row * n + slot, tl.where(is_open, token, -1).to(tl.int32), mask=inside)


def page_scores(query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
    """Compute ``selection.page_scores`` in float32, whatever the dtype of the query."""
    query, bounds = with_dense_rows(query), bounds.contiguous()
    heads, pages, d_k = bounds.shape[0], bounds.shape[1], query.shape[1]
    group = len(query) // heads
    scores = torch.empty((heads, group, pages), dtype=torch.float32, device=query.device)
    grid = heads, triton.cdiv(pages, SCORED_PAGES)
    shape = group, d_k, padded(d_k), SCORED_PAGES
    _page_scores[grid](query, bounds, scores, pages, query.stride(0), scaling, *shape, num_warps=4)
    return scores


def needs_correction(query: Tensor, before: Tensor, kv_heads: int, tau: float) -> Tensor:
    """Compute ``selection.needs_correction``."""
    query, before = with_dense_rows(query), with_dense_rows(before)
    flags = torch.empty(kv_heads, dtype=torch.bool, device=query.device)
    group, d_k = len(query) // kv_heads, query.shape[1]
    strides, shape = (query.stride(0), before.stride(0)), (triton.next_power_of_2(group), padded(d_k))
    _needs_correction[(kv_heads,)](
        query, before, flags.view(torch.uint8), *strides, tau, group, d_k, *shape, num_warps=1
    )
    return flags


def choosable(pages: int, k: int) -> bool:
    """Return True if one program can choose ``k`` of ``pages`` pages."""
    return pages <= MOST_PAGES and k <= MOST_CHOSEN


def choose(scores: Tensor, candidates: Candidates, resident: Tensor, flagged: Tensor | None) -> Tensor:
    """Implement ``TorchOps.choose`` if it is ``choosable``; programs of heads not ``flagged`` return at once."""
    heads, group, pages = scores.shape
    k = resident.shape[1]
    resident = resident.contiguous()
    chosen = torch.empty_like(resident)
    best = torch.empty((heads, k), dtype=torch.int32, device=scores.device)
    flags = best if flagged is None else flagged.view(torch.uint8)
    shape = flagged is not None, group, max(LEAST_PAGES, padded(pages)), padded(k)
    warps = 4 if pages <= 2048 and k <= 64 else 8 if pages <= 4096 else 16  # a program's pages stay in registers
    _choose[(heads,)](
        scores, candidates.first, candidates.last, resident, flags, best, chosen, pages, k, *shape, num_warps=warps
    )
    return chosen


def open_pages(slots: DeviceSlots, layers: slice, first: int, last: Tensor) -> None:
    """Implement ``TorchOps.open_pages``."""
    pages, table = slots.pages[layers], slots.table[layers]
    k = pages.shape[2]
    if pages.numel():
        grid = pages.shape[0] * pages.shape[1], triton.cdiv(slots.offset, OPENED)
        _open_pages[grid](table, pages, last, k, slots.n, first, slots.geometry.page, OPENED, num_warps=4)
