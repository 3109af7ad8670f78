"""The loops behind freeze mode on a CPU, compiled by numba: one pass in place of many operations."""

from __future__ import annotations

import math

import numba
import numpy as np

from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops.compiled import HAS_THREADS, Array, add_softmax, compiled, find_best, score_pages


@numba.njit  # type: ignore[untyped-decorator]
def _says(mask: Array, token: int) -> bool:
    """The entry of ``mask`` for ``token``; the last entry holds for all later tokens."""
    return bool(mask[min(token, len(mask) - 1)])


@compiled(
    "void(i4[::1], f4[::1], i4[::1], b1[::1], b1[::1], i8, i8, f4, f4, f8, b1, b1, b1, i4[::1], i4[::1], b1[::1])"
)
def flag(
    table: Array,
    score: Array,
    detections: Array,
    pins: Array,
    protected: Array,
    first: int,
    end: int,
    tau: float,
    high: float,
    k: float,
    halves: bool,
    sooner: bool,
    holds: bool,
    counts: Array,
    away: Array,
    sought: Array,
) -> None:
    """``Timers._flag`` of the tokens in ``table [n]`` into ``counts``, ``away`` and ``sought``, ``[n]`` each.

    Tokens from ``first`` up to ``end`` may freeze, but for ``pins`` and ``protected`` ones.
    """
    for slot in range(len(table)):
        token = table[slot]
        counts[slot], away[slot], sought[slot] = 0, 0, False
        if token == EMPTY:
            continue
        may = first <= token < end and not _says(pins, token) and not _says(protected, token)
        low, count = may and score[slot] < tau, detections[token]
        if halves and score[slot] > tau and count > 0:
            count //= 2
        elif low:
            count += 1
        counts[slot], sought[slot] = count, may and score[slot] > high
        if low and not holds:
            away[slot] = max(0, math.floor(math.sqrt(max(count, 0)) / k) - sooner)


@compiled("void(i8, i4[::1], f4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], f4[::1], b1[::1], b1[::1])")
def store_step(
    position: int,
    table: Array,
    score: Array,
    counts: Array,
    away: Array,
    detections: Array,
    timer: Array,
    since: Array,
    scores: Array,
    frozen: Array,
    waiting: Array,
) -> None:
    """``Timers._store_step`` of the tokens in ``table [n]``; ``waiting`` and what stands before it are by token."""
    for token in range(len(timer)):
        timer[token] -= 1
    for slot in range(len(table)):
        token = table[slot]
        if token != EMPTY:
            detections[token], scores[token], frozen[token] = counts[slot], score[slot], away[slot] > 0
            if away[slot] > 0:
                timer[token], since[token] = away[slot], position
    for token in range(len(timer)):
        waiting[token] = frozen[token] and timer[token] <= 0
        if waiting[token]:
            frozen[token] = False


@compiled("void(f4[:, :, :, ::1], f4[:, :, :, ::1], f4[::1], i8[::1], i8, i8, f4, b1[::1])", parallel=HAS_THREADS)
def name(
    query: Array, bounds: Array, scales: Array, sight: Array, position: int, page_size: int, least: float, named: Array
) -> None:
    """``Freeze._named``: sets ``named [capacity + 1]``, all False, at the tokens of pages with more than ``least``.

    ``query [layers, H, G, d_k]`` and ``bounds [layers, H, page, 2 * d_k]``; a layer sees ``sight`` tokens.
    """
    heads, group = query.shape[1:3]
    end = position // page_size + 1
    for task in numba.prange(len(query) * heads):
        layer, head = task // heads, task % heads
        first = max(0, position + 1 - sight[layer]) // page_size
        pages = max(0, end - first)
        scores, powers = np.empty((group, pages), np.float32), np.empty(pages, np.float32)
        weights = np.zeros(pages, np.float32)
        score_pages(query[layer, head], bounds[layer, head, first:end], scales[layer], scores)
        for g in range(group if pages else 0):
            add_softmax(scores[g], weights, powers)
        for page in range(pages):
            if weights[page] > least * group:
                start = (first + page) * page_size
                for token in range(start, min(start + page_size, position + 1)):
                    named[token] = True


@compiled("void(f4[:, :, :, :, :], i8, i8, f4[:, :, :, ::1])")
def widen(kv: Array, slot: int, page: int, bounds: Array) -> None:
    """``Freeze._widen_bounds`` by the key in ``slot`` of ``kv [layers, 2, H, n, d]``, which is of this ``page``."""
    d = bounds.shape[3] // 2
    for layer in range(bounds.shape[0]):
        for head in range(bounds.shape[1]):
            row = bounds[layer, head, page]
            for i in range(d):
                row[i] = max(row[i], kv[layer, 0, head, slot, i])
                row[d + i] = max(row[d + i], -kv[layer, 0, head, slot, i])


@compiled("void(i4[::1], b1[::1], i8, i8, b1[::1])")
def follow(table: Array, sought: Array, position: int, following: int, named: Array) -> None:
    """Sets ``named [capacity + 1]`` at the ``following`` tokens from each ``sought [n]`` one on, up to ``position``."""
    for slot in range(len(table)):
        if sought[slot]:
            for token in range(table[slot], min(table[slot] + following, position + 1)):
                named[token] = True


@compiled("UniTuple(i8, 2)(i8, i4[::1], i4[::1], b1[::1], b1[::1])")
def reopen(position: int, table: Array, held: Array, frozen: Array, absent: Array) -> tuple[int, int]:
    """``Timers.reopen``: how many were put into ``table [n]`` where they lie, and how many are ``absent [token]``."""
    reopened, missing = 0, 0
    for token in range(len(frozen)):
        absent[token] = token < position and not frozen[token]
        missing += absent[token]
    for slot in range(len(table)):
        if table[slot] == EMPTY and held[slot] != EMPTY and not frozen[held[slot]]:
            table[slot] = held[slot]
            reopened += 1
        token = table[slot]
        if token != EMPTY and absent[token]:
            absent[token] = False
            missing -= 1
    return reopened, missing


@compiled("void(i4[::1], i4[::1], i4[::1], i8[::1])")
def reused(table: Array, held: Array, timer: Array, slots: Array) -> None:
    """``Timers.reused`` into ``slots``, as many as these are."""
    away = np.empty(len(table), np.float32)
    for slot in range(len(table)):
        if table[slot] != EMPTY:
            away[slot] = -1
        else:
            away[slot] = np.inf if held[slot] == EMPTY else max(0, timer[held[slot]])
    find_best(away, 0, slots, np.empty(len(slots), np.float32))


@compiled("void(i4[::1], i4[::1], b1[::1], b1)")
def close(table: Array, held: Array, frozen: Array, keeps: bool) -> None:
    """``Timers.close``."""
    for slot in range(len(table)):
        token = table[slot]
        if not keeps:
            held[slot] = EMPTY
        elif token != EMPTY:
            held[slot] = token
        if token != EMPTY and frozen[token]:
            table[slot] = EMPTY
