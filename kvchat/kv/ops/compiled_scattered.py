"""One token's attention over tokens that lie scattered through the host pool, compiled by numba.

Waiting for memory is what it costs: rows of a quarter of a kilobyte come one by one, and a processor fetches ahead only
what lies in a row. The loops ask for each ``AHEAD`` tokens before it is due: over 400 of 8,192 tokens, 4 KV heads of
64, 0.08 ms instead of 0.12, over 2,100 of them 0.29 instead of 0.53, over 5,000 of them 0.61 instead of 0.97; all 8,192
in a row take 0.68.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvchat.kv.ops.compiled import HAS_THREADS, Array, compiled, widened

AHEAD = 32
TOKENS = 256  # that one thread reads at a time
LINE = 64  # bytes that the processor fetches at once
ROWS = "f4[:, :, ::1], number[::1], i8, i8, i4[::1], i8"  # what both loops take
# The arguments of LLVM's prefetch. Into the first cache few lines can be under way at once: 5,000 tokens took 1.4 times
# as long.
FOR_READING, SECOND_CACHE, DATA = 0, 2, 1


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for the memory line of ``array[index]``; nothing waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape)
        builder.call(prefetch, [address, number(FOR_READING), number(SECOND_CACHE), number(DATA)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@compiled(f"void({ROWS}, f4[:, :, ::1])", fastmath=True, parallel=HAS_THREADS)
def scores(
    query: Array, keys: Array, head_stride: int, token_stride: int, table: Array, first: int, scores: Array
) -> None:
    """Products of ``query [H, G, d_k]`` and the keys of the tokens in ``table [n]`` into ``scores [H, G, n]``.

    ``keys`` is the memory from the first key on; strides are in numbers. 0 for tokens before ``first`` and empty slots.
    """
    heads, group, n = scores.shape
    d = query.shape[2]
    parts = -(-n // TOKENS)
    for task in numba.prange(heads * parts):
        head, begin = task // parts, task % parts * TOKENS
        for slot in range(begin, min(n, begin + TOKENS)):
            soon = head * head_stride + max(first, table[min(slot + AHEAD, n - 1)]) * token_stride
            for i in range(0, d, LINE // keys.itemsize):
                _prefetch(keys, soon + i)
            token = table[slot]
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
    """The values of the tokens in ``table [n]`` times ``weights [H, G, n]``, added up.

    For each ``TOKENS`` slots into ``sums [H, part, G, d_v]``.
    """
    heads, parts, group, d = sums.shape
    n = weights.shape[2]
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        total = sums[head, part]
        total[:] = 0
        for slot in range(part * TOKENS, min(n, (part + 1) * TOKENS)):
            soon = head * head_stride + max(first, table[min(slot + AHEAD, n - 1)]) * token_stride
            for i in range(0, d, LINE // values.itemsize):
                _prefetch(values, soon + i)
            token = table[slot]
            if token < first:
                continue
            start = head * head_stride + token * token_stride
            value = values[start : start + d]
            for g in range(group):
                for i in range(d):
                    total[g, i] += weights[head, g, slot] * widened(value[i])
