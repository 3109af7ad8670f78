"""One token's attention over pages of which some have 8 bits, compiled by numba.

Codes are multiplied without unpacking them: the scales of a page's key channels are multiplied into the query once per
page, a value's scale into its weight. A page is in ``rows`` (full precision), or in ``codes`` and ``scales``, two views
of the same memory with ``block`` bytes per KV head; ``places [page]`` says where, as in ``EightBitPool``. The loops
read the tokens in ``table [H or 1, n]``, ascending. Strides count numbers, not bytes.
"""

from __future__ import annotations

import numba
import numpy as np

from kvchat.kv.ops.numba.loops import HAS_THREADS, Array, compiled, widened

TOKENS = 256  # tokens per task of a thread
PAGES = "i4[:, :], i8[::1], number[::1], i8, i8, i1[::1], number[::1], i8, i8"


@compiled(f"void(f4[:, :, ::1], {PAGES}, f4[:, :, ::1])", fastmath=True, parallel=HAS_THREADS)
def scores(
    query: Array,
    table: Array,
    places: Array,
    rows: Array,
    head_stride: int,
    token_stride: int,
    codes: Array,
    scales: Array,
    block: int,
    page_size: int,
    scores: Array,
) -> None:
    """Write the products of ``query [H, G, d_k]`` and the keys to ``scores [H, G, n]``."""
    heads, group, n = scores.shape
    d = query.shape[2]
    parts = -(-n // TOKENS)
    for task in numba.prange(heads * parts):
        head, begin = task // parts, task % parts * TOKENS
        named = table[head % len(table)]
        scaled = np.empty((group, d), np.float32)
        place, low, high, at = 0, 0, 0, 0
        for slot in range(begin, min(n, begin + TOKENS)):
            token = named[slot]
            if not low <= token < high:
                low = token // page_size * page_size
                high, place = low + page_size, places[token // page_size]
                at = (~place * heads + head) * block
                of_keys = (at + 2 * page_size * token_stride) // scales.itemsize
                for g in range(group if place < 0 else 0):
                    for i in range(d):
                        scaled[g, i] = query[head, g, i] * widened(scales[of_keys + i])
            if place >= 0:
                start = head * head_stride + (place * page_size + token - low) * token_stride
                key = rows[start : start + d]
                for g in range(group):
                    score = np.float32(0)
                    for i in range(d):
                        score += query[head, g, i] * widened(key[i])
                    scores[head, g, slot] = score
            else:
                start = at + (token - low) * token_stride
                code = codes[start : start + d]
                for g in range(group):
                    score = np.float32(0)
                    for i in range(d):
                        score += scaled[g, i] * np.float32(np.int32(code[i]))  # otherwise numba computes in 64 bits
                    scores[head, g, slot] = score


@compiled(f"void(f4[:, :, ::1], {PAGES}, f4[:, :, :, ::1])", fastmath=True, parallel=HAS_THREADS)
def sums(
    weights: Array,
    table: Array,
    places: Array,
    rows: Array,
    head_stride: int,
    token_stride: int,
    codes: Array,
    scales: Array,
    block: int,
    page_size: int,
    sums: Array,
) -> None:
    """Write the values times ``weights [H, G, n]``, summed per ``TOKENS`` slots, to ``sums [H, part, G, d_v]``."""
    heads, parts, group, d = sums.shape
    n = weights.shape[2]
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        named = table[head % len(table)]
        total = sums[head, part]
        total[:] = 0
        place, low, high, at = 0, 0, 0, 0
        for slot in range(part * TOKENS, min(n, (part + 1) * TOKENS)):
            token = named[slot]
            if not low <= token < high:
                low = token // page_size * page_size
                high, place = low + page_size, places[token // page_size]
                at = (~place * heads + head) * block
            if place >= 0:
                start = head * head_stride + (place * page_size + token - low) * token_stride
                value = rows[start : start + d]
                for g in range(group):
                    for i in range(d):
                        total[g, i] += weights[head, g, slot] * widened(value[i])
            else:
                start = at + (page_size + token - low) * token_stride
                code = codes[start : start + d]
                of_value = (at + 2 * page_size * token_stride) // scales.itemsize + token_stride + token - low
                for g in range(group):
                    weight = weights[head, g, slot] * widened(scales[of_value])
                    for i in range(d):
                        total[g, i] += weight * np.float32(np.int32(code[i]))
