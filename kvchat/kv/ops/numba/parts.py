"""Functions that several modules of loops share; each compiles its own copy, so that modules compile independently."""

from __future__ import annotations

import numba
import numpy as np

from kvchat.kv.ops.numba.loops import FINITE_OR_NOT, Array, exp, widened

TINY = np.float32(1e-30)  # the least divisor, for scores that are NaN


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def score_pages(query: Array, bounds: Array, scaling: float, scores: Array) -> None:
    """Score one head's pages: ``query [G, d_k]`` and ``bounds [page, 2 * d_k]`` into ``scores [G, page]``."""
    group, d = query.shape
    parts = np.empty((group, 2 * d), np.float32)
    for g in range(group):
        for i in range(d):
            x = query[g, i] * scaling
            parts[g, i] = max(x, np.float32(0))
            parts[g, d + i] = max(-x, np.float32(0))
    for page in range(len(bounds)):
        for g in range(group):
            score = np.float32(0)
            for i in range(2 * d):
                score += parts[g, i] * widened(bounds[page, i])
            scores[g, page] = score


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def add_softmax(scores: Array, weights: Array, powers: Array) -> None:
    """Add the softmax of ``scores`` to ``weights``; overwrites ``powers``, of the same length."""
    highest, total = scores[0], np.float32(0)
    for score in scores:
        highest = max(highest, score)
    for i in range(len(scores)):
        powers[i] = exp(scores[i] - highest)
        total += powers[i]
    for i in range(len(scores)):
        weights[i] += powers[i] / total


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def join_parts(highest: Array, totals: Array, sums: Array, sinks: Array, result: Array) -> None:
    """Join the attention over parts of the tokens into ``result [H, rows, d_v]``.

    If ``result`` has one more column, it gets the log-sum-exp.

    Args:
        highest: maximum score of each part, ``[H, part, rows or more]``.
        totals: sum of exponentials of each part's scores less its maximum, same shape.
        sums: values weighted by these exponentials, ``[H, part, rows, d_v]``.
        sinks: learned logits ``[H, rows]``, or ``[0, 0]``.
    """
    heads, rows, columns = result.shape
    d_v = sums.shape[3]
    for head in range(heads):
        for row in range(rows):
            most, whole = highest[head, 0, row], np.float32(0)
            for part in range(sums.shape[1]):
                most = max(most, highest[head, part, row])
            if len(sinks):
                most = max(most, sinks[head, row])
                whole = exp(sinks[head, row] - most)
            result[head, row] = 0
            for part in range(sums.shape[1]):
                share = exp(highest[head, part, row] - most)
                whole += share * totals[head, part, row]
                for i in range(d_v):
                    result[head, row, i] += share * sums[head, part, row, i]
            for i in range(d_v):
                result[head, row, i] /= whole + TINY
            if columns > d_v:
                result[head, row, d_v] = most + np.log(whole + TINY)


@numba.njit  # type: ignore[untyped-decorator]
def turn(heads: Array, cos: Array, sin: Array) -> None:
    """Rotate the ``heads [n, d]`` of one token by ``cos`` and ``sin [d]``, pairing the first half with the second."""
    half = heads.shape[1] // 2
    for head in range(len(heads)):
        for i in range(half):
            low, high = heads[head, i], heads[head, half + i]
            heads[head, i] = low * cos[i] - high * sin[i]
            heads[head, half + i] = high * cos[half + i] + low * sin[half + i]
