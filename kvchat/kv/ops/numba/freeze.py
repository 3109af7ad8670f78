"""Loops of freeze mode on a CPU, compiled by numba: one pass instead of many operations."""

from __future__ import annotations

import math

import numba
import numpy as np

from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops.numba.loops import HAS_THREADS, Array, compiled
from kvchat.kv.ops.numba.parts import add_softmax, score_pages


@numba.njit  # type: ignore[untyped-decorator]
def _entry(mask: Array, token: int) -> bool:
    """Return the entry of ``mask`` for ``token``; the last entry is for all later tokens."""
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
    retrieved: Array,
) -> None:
    """Compute ``Timers._flag`` of ``table [n]`` into ``counts``, ``away`` and ``retrieved``, ``[n]`` each.

    Tokens from ``first`` up to ``end`` may freeze unless ``pins`` or ``protected``.
    """
    for slot in range(len(table)):
        token = table[slot]
        counts[slot], away[slot], retrieved[slot] = 0, 0, False
        if token == EMPTY:
            continue
        may = first <= token < end and not _entry(pins, token) and not _entry(protected, token)
        low, count = may and score[slot] < tau, detections[token]
        if halves and score[slot] > tau and count > 0:
            count //= 2
        elif low:
            count += 1
        counts[slot], retrieved[slot] = count, may and score[slot] > high
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
    """Compute ``Timers._store_step`` of ``table [n]``; ``detections`` to ``waiting`` are indexed by token."""
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


@compiled("void(f4[:, :, :, ::1], number[:, :, :, ::1], f4[::1], i8[::1], i8, i8, f4, b1[::1])", parallel=HAS_THREADS)
def mark_hot(
    query: Array, bounds: Array, scales: Array, sight: Array, position: int, page_size: int, least: float, hot: Array
) -> None:
    """Compute ``Freeze._hot_pages``: set ``hot [capacity + 1]`` for all tokens of pages with more than ``least``.

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
                    hot[token] = True


@compiled("void(i4[::1], b1[::1], i8, i8, b1[::1])")
def mark_followers(table: Array, retrieved: Array, position: int, following: int, hot: Array) -> None:
    """Set ``hot [capacity + 1]`` for ``following`` tokens from each ``retrieved [n]`` one on, up to ``position``."""
    for slot in range(len(table)):
        if retrieved[slot]:
            for token in range(table[slot], min(table[slot] + following, position + 1)):
                hot[token] = True
