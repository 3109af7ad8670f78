"""Parts of the loops of several modules, compiled into each: one module can be compiled without the others."""

from __future__ import annotations

import numba
import numpy as np

from kvchat.kv.ops.numba.loops import FINITE_OR_NOT, Array, exp, widened

TINY = np.float32(1e-30)  # where scores are no numbers


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def score_pages(query: Array, bounds: Array, scaling: float, scores: Array) -> None:
    """One head's ``query [G, d_k]`` and ``bounds [page, 2 * d_k]`` into ``scores [G, page]``."""
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
    """Add the softmax over ``scores`` to ``weights``; ``powers``, as long, is overwritten."""
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
    """Attention over all tokens, of that over parts of them, into ``result [H, rows, d_v]``.

    Where it has a column more, that is the logarithm of the sum of exponentials.

    Args:
        highest: each part's highest score ``[H, part, rows or more]``.
        totals: the sums of e to the power of its scores, less the highest; of the same shape.
        sums: its values times these powers, ``[H, part, rows, d_v]``.
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
    """Turn the ``heads [n, d]`` of one token by ``cos`` and ``sin [d]``, first half against second half."""
    half = heads.shape[1] // 2
    for head in range(len(heads)):
        for i in range(half):
            low, high = heads[head, i], heads[head, half + i]
            heads[head, i] = low * cos[i] - high * sin[i]
            heads[head, half + i] = high * cos[half + i] + low * sin[half + i]
