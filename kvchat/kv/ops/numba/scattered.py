"""One token's attention over tokens that lie scattered through the host pool, compiled by numba.

Waiting for memory is what it costs: rows of a quarter of a kilobyte come one by one, and a processor fetches ahead only
what lies in a row. The loops ask for each ``AHEAD`` tokens before it is due: over 400 of 8,192 tokens, 4 KV heads of
64, 0.08 ms instead of 0.12, over 2,100 of them 0.29 instead of 0.53, over 5,000 of them 0.61 instead of 0.97; all 8,192
in a row take 0.68.
"""

from __future__ import annotations

import numba
import numpy as np

from kvchat.kv.ops.numba.loops import HAS_THREADS, Array, compiled, prefetch, widened

AHEAD = 32
TOKENS = 256  # that one thread reads at a time
ROWS = "f4[:, :, ::1], number[::1], i8, i8, i4[:, :], i8"  # what both loops take


@compiled(f"void({ROWS}, f4[:, :, ::1])", fastmath=True, parallel=HAS_THREADS)
def scores(
    query: Array, keys: Array, head_stride: int, token_stride: int, table: Array, first: int, scores: Array
) -> None:
    """Products of ``query [H, G, d_k]`` and the keys of the tokens in ``table [H or 1, n]`` into ``scores [H, G, n]``.

    ``keys`` is the memory from the first key on; strides are in numbers. 0 for tokens before ``first`` and empty slots.
    """
    heads, group, n = scores.shape
    d = query.shape[2]
    parts = -(-n // TOKENS)
    for task in numba.prange(heads * parts):
        head, begin = task // parts, task % parts * TOKENS
        named = table[head % len(table)]
        for slot in range(begin, min(n, begin + TOKENS)):
            soon = head * head_stride + max(first, named[min(slot + AHEAD, n - 1)]) * token_stride
            prefetch(keys, soon, d)
            token = named[slot]
            if token < first:
                for g in range(group):
                    scores[head, g, slot] = 0
                continue
            start = head * head_stride + token * token_stride
            key = keys[start : start + d]
            for g in range(group):
                score = np.float32(0)
                for i in range(d):
                    score += query[head, g, i] * widened(key[i])
                scores[head, g, slot] = score


@compiled(f"void({ROWS}, f4[:, :, :, ::1])", fastmath=True, parallel=HAS_THREADS)
def sums(
    weights: Array, values: Array, head_stride: int, token_stride: int, table: Array, first: int, sums: Array
) -> None:
    """The values of the tokens in ``table [H or 1, n]`` times ``weights [H, G, n]``, added up.

    For each ``TOKENS`` slots into ``sums [H, part, G, d_v]``.
    """
    heads, parts, group, d = sums.shape
    n = weights.shape[2]
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        named = table[head % len(table)]
        total = sums[head, part]
        total[:] = 0
        for slot in range(part * TOKENS, min(n, (part + 1) * TOKENS)):
            soon = head * head_stride + max(first, named[min(slot + AHEAD, n - 1)]) * token_stride
            prefetch(values, soon, d)
            token = named[slot]
            if token < first:
                continue
            start = head * head_stride + token * token_stride
            value = values[start : start + d]
            for g in range(group):
                for i in range(d):
                    total[g, i] += weights[head, g, slot] * widened(value[i])
