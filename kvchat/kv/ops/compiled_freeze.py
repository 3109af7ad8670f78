"""The loops behind ``freeze_timers`` on a CPU, compiled by numba: two passes over the tokens for forty operations."""

from __future__ import annotations

import math

import numba

from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops.compiled import Array, compiled


@numba.njit  # type: ignore[untyped-decorator]
def _says(mask: Array, token: int) -> bool:
    """What a mask says of a token; its last entry is for all later ones."""
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
def settle(
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
    """``Timers._settle`` of the tokens in ``table [n]``; ``waiting`` and what stands before it are by token."""
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
