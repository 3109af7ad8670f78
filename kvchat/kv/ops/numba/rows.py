"""Attention and matrix products of a few tokens at once, as for verifying drafts, compiled by numba.

Each key and value is read once for all rows (tokens times query heads per KV head). A vector holds 16 rows, so that one
element of a key is multiplied by all of them at once and no sum across a vector is needed. On one thread, over 16,000
tokens with 4 KV heads of 64, 8 rows take 1.5 times as long as the two rows of one token and 32 rows 2.6 times; torch's
products, which store the scores, take 4 to 6 times as long.

Weight rows are long enough to sum across a vector at their end. For 8 rows instead of one, MKL takes 3.3 to 4.4 times
as long (AMD EPYC, one thread), this loop 1.8 to 2.4 times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvchat.kv.ops.numba.loops import FINITE_OR_NOT, HAS_THREADS, Array, compiled, exp, prefetch, widened
from kvchat.kv.ops.numba.parts import join_parts

LANES = 16  # rows per vector
TOKENS = 512  # tokens per task of a thread
TILE = 8  # tokens whose sums stay in registers
AHEAD = 16  # prefetch distance in tokens
ROWS, VECTORS = 4, 4  # rows, and vectors of each, whose sums stay in registers
OUTPUTS = 32  # outputs per task of a thread
STRIP = 8 * LANES  # numbers in a loop that the compiler vectorizes
UNSEEN = np.float32(np.finfo(np.float32).min / 4)  # finite, because the difference of two infinities is NaN
SIZE, WORD, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
NOTHING, ZEROS = ir.Constant(VECTOR, ir.Undefined), ir.Constant(VECTOR, [0.0] * LANES)
TO_ALL = ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES)


def _to_all(builder: Any, number: Any) -> Any:
    return builder.shuffle_vector(builder.insert_element(NOTHING, number, WORD(0)), NOTHING, TO_ALL)


def _pointer(builder: Any, data: Any, index: Any, number: ir.Type = FLOAT) -> Any:
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(number, LANES).as_pointer())


def _as_floats(builder: Any, stored: Any) -> Any:
    """Apply ``widened`` to a number or a vector."""
    if stored.type in (FLOAT, VECTOR):
        return stored
    is_one = isinstance(stored.type, ir.IntType)
    words, floats = (WORD, FLOAT) if is_one else (ir.VectorType(WORD, LANES), VECTOR)
    upper = ir.Constant(words, 16 if is_one else [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(stored, words), upper), floats)


def _add_product(builder: Any, total: Any, one: Any, other: Any) -> None:
    """Add ``one * other`` to the vector at ``total``."""
    shape = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(fma, [one, other, builder.load(total)]), total)


def _sums(builder: Any, rows: int, columns: int) -> list[list[Any]]:
    """Return zeroed vectors in registers."""
    found = [[cgutils.alloca_once(builder, VECTOR) for _ in range(columns)] for _ in range(rows)]
    for total in (total for row in found for total in row):
        builder.store(ZEROS, total)
    return found


def _data(context: Any, builder: Any, signature: Any, arguments: Any, *numbers: int) -> list[Any]:
    return [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in numbers]


def _scorer(vectors: int) -> Callable[..., Any]:
    """Return code that multiplies ``vectors`` vectors of rows by the keys of ``TILE / vectors`` tokens.

    Of these, ``left`` exist; the last one is used instead of missing ones.
    """
    tokens = TILE // vectors

    @intrinsic  # type: ignore[untyped-decorator]
    def score(
        _context: Any, query: Any, keys: Any, at: Any, stride: Any, left: Any, d: Any, scores: Any, to: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query, keys, scores = _data(context, builder, signature, arguments, 0, 1, 6)
            at, stride, left, d, to = (arguments[i] for i in (2, 3, 4, 5, 7))
            last, starts = builder.sub(left, SIZE(1)), []
            for token in map(SIZE, range(tokens)):
                there = builder.select(builder.icmp_signed("<", token, left), token, last)
                starts.append(builder.add(at, builder.mul(stride, there)))
            totals = _sums(builder, tokens, vectors)
            with cgutils.for_range(builder, d) as loop:
                parts = [builder.add(builder.mul(d, SIZE(vector)), loop.index) for vector in range(vectors)]
                rows = [builder.load(_pointer(builder, query, builder.mul(i, SIZE(LANES))), align=4) for i in parts]
                for start, of_token in zip(starts, totals, strict=True):
                    number = builder.load(builder.gep(keys, [builder.add(start, loop.index)]))
                    key = _to_all(builder, _as_floats(builder, number))
                    for row, total in zip(rows, of_token, strict=True):
                        _add_product(builder, total, key, row)
            for token, of_token in enumerate(totals):
                for vector, total in enumerate(of_token):
                    place = builder.add(to, SIZE((vector * TOKENS + token) * LANES))
                    builder.store(builder.load(total), _pointer(builder, scores, place), align=4)
            return context.get_dummy_value()

        return types.void(query, keys, at, stride, left, d, scores, to), generate

    made: Callable[..., Any] = score
    return made


def _adder(vectors: int) -> Callable[..., Any]:
    """Return code that sums the weighted values of ``tokens`` tokens for ``ROWS`` rows of ``vectors`` vectors."""

    @intrinsic  # type: ignore[untyped-decorator]
    def add(
        _context: Any, weights: Any, of: Any, values: Any, at: Any, stride: Any, tokens: Any, sums: Any, to: Any, d: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, values, sums = _data(context, builder, signature, arguments, 0, 2, 6)
            of, at, stride, tokens, to, d = (arguments[i] for i in (1, 3, 4, 5, 7, 8))
            number, columns = context.get_data_type(signature.args[2].dtype), range(vectors)
            totals = _sums(builder, ROWS, vectors)
            with cgutils.for_range(builder, tokens) as loop:
                start = builder.add(at, builder.mul(loop.index, stride))
                first = builder.add(of, builder.mul(loop.index, SIZE(LANES)))
                places = [_pointer(builder, values, builder.add(start, SIZE(i * LANES)), number) for i in columns]
                value = [_as_floats(builder, builder.load(place, align=2)) for place in places]
                for row, of_row in enumerate(totals):
                    weight = _to_all(builder, builder.load(builder.gep(weights, [builder.add(first, SIZE(row))])))
                    for part, total in zip(value, of_row, strict=True):
                        _add_product(builder, total, weight, part)
            for row, of_row in enumerate(totals):
                for i, total in enumerate(of_row):
                    place = builder.add(to, builder.add(builder.mul(d, SIZE(row)), SIZE(i * LANES)))
                    builder.store(builder.load(total), _pointer(builder, sums, place), align=4)
            return context.get_dummy_value()

        return types.void(weights, of, values, at, stride, tokens, sums, to, d), generate

    made: Callable[..., Any] = add
    return made


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_tile(
    _context: Any, x: Any, x_at: Any, weight: Any, weight_at: Any, size: Any, sums: Any, to: Any, stride: Any
) -> Any:
    """Multiply ``ROWS`` rows of x by ``ROWS`` rows of the weights, of ``size`` numbers each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, sums = _data(context, builder, signature, arguments, 0, 2, 5)
        x_at, weight_at, size, to, stride = (arguments[i] for i in (1, 3, 4, 6, 7))
        totals = _sums(builder, ROWS, ROWS)

        def vectors(data: Any, at: Any, index: Any) -> list[Any]:
            places = [builder.add(builder.add(at, builder.mul(size, SIZE(row))), index) for row in range(ROWS)]
            return [builder.load(_pointer(builder, data, place), align=4) for place in places]

        with cgutils.for_range(builder, builder.sdiv(size, SIZE(LANES))) as loop:
            index = builder.mul(loop.index, SIZE(LANES))
            of_x = vectors(x, x_at, index)
            for of_row, weights in zip(totals, vectors(weight, weight_at, index), strict=True):
                for total, numbers in zip(of_row, of_x, strict=True):
                    _add_product(builder, total, weights, numbers)
        shape = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
        added = cgutils.get_or_insert_function(builder.module, shape, f"llvm.vector.reduce.fadd.v{LANES}f32")
        for row, of_row in enumerate(totals):
            for i, total in enumerate(of_row):
                place = builder.add(to, builder.add(builder.mul(stride, SIZE(i)), SIZE(row)))
                product = builder.call(added, [FLOAT(0.0), builder.load(total)], fastmath=("reassoc",))
                builder.store(product, builder.gep(sums, [place]))
        return context.get_dummy_value()

    return types.void(x, x_at, weight, weight_at, size, sums, to, stride), generate


_score, _score_pair = _scorer(1), _scorer(2)
_add_wide, _add_vector = _adder(VECTORS), _adder(1)


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _highest(scores: Array, highest: Array) -> None:
    """Write the maximum of each lane of ``scores [n * STRIP]`` to ``highest [STRIP]``, repeated to fill the strip."""
    for i in range(STRIP):  # an array assignment takes seconds to compile
        highest[i] = scores[i]
    for begin in range(STRIP, len(scores), STRIP):
        strip = scores[begin : begin + STRIP]
        for i in range(STRIP):
            highest[i] = strip[i] if strip[i] > highest[i] else highest[i]
    for begin in range(LANES, STRIP, LANES):
        for lane in range(LANES):
            highest[lane] = max(highest[lane], highest[begin + lane])
    for begin in range(LANES, STRIP, LANES):
        for lane in range(LANES):
            highest[begin + lane] = highest[lane]


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _to_powers(scores: Array, highest: Array, totals: Array) -> None:
    """Replace ``scores`` by ``exp(scores - highest)``; write each lane's sum to the first of ``totals [STRIP]``."""
    totals[:] = 0
    for begin in range(0, len(scores), STRIP):
        strip = scores[begin : begin + STRIP]
        for i in range(STRIP):
            strip[i] = exp(strip[i] - highest[i])
            totals[i] += strip[i]
    for begin in range(LANES, STRIP, LANES):
        for lane in range(LANES):
            totals[lane] += totals[begin + lane]


@numba.njit  # type: ignore[untyped-decorator]
def _score_tile(query: Array, keys: Array, at: int, stride: int, left: int, d: int, scores: Array, token: int) -> None:
    """Multiply ``query [vectors, d, LANES]`` by the keys of a tile, from the ``token``-th of a part on.

    The tile has ``left`` tokens; the last one is scored instead of the missing ones.
    """
    vectors, half = len(query), TILE // 2
    for vector in range(0, vectors - 1, 2):
        to = (vector * TOKENS + token) * LANES
        _score_pair(query[vector:], keys, at, stride, left, d, scores, to)
        _score_pair(query[vector:], keys, at + half * stride, stride, left - half, d, scores, to + half * LANES)
    if vectors % 2:
        to = ((vectors - 1) * TOKENS + token) * LANES
        _score(query[vectors - 1 :], keys, at, stride, left, d, scores, to)


@numba.njit  # type: ignore[untyped-decorator]
def _mask_unseen(scores: Array, first: int, vector: int, end: int, new: int, window: int) -> None:
    """Mask ``scores [n * LANES]`` of the tokens from ``first`` on for the rows of a vector that do not see them."""
    for lane in range(LANES):
        position = end - new + (vector * LANES + lane) % new
        for token in range(len(scores) // LANES):
            if not position - window < first + token <= position:
                scores[token * LANES + lane] = UNSEEN


@compiled(
    "void(f4[:, :, :, ::1], number[::1], i8, i8, number[::1], i8, i8, i8, i8, i8, i8, f8, f4[:, ::1], f4[:, :, ::1])",
    fastmath=FINITE_OR_NOT,
    parallel=HAS_THREADS,
)
def attend_rows(
    query: Array,
    keys: Array,
    key_head: int,
    key_token: int,
    values: Array,
    value_head: int,
    value_token: int,
    begin: int,
    end: int,
    new: int,
    window: int,
    softcap: float,
    sinks: Array,
    result: Array,
) -> None:
    """Compute exact attention of the last ``new`` of ``end`` tokens.

    Args:
        query: float32 ``[H, vectors, d_k, LANES]`` times the layer's scale; row r of a KV head is of new token r % new.
        keys: memory from the first key on, with the strides of heads and tokens in numbers.
        values: as keys.
        begin: first token that any of the rows sees.
        end: number of tokens.
        new: number of tokens that attend.
        window: number of most recent tokens that each sees.
        softcap: the layer's, or 0.
        sinks: learned logits ``[H, rows]``, or ``[0, 0]``.
        result: output, float32 ``[H, rows, d_v]``; ``rows`` is a multiple of ``ROWS``, ``d_v`` of ``LANES``.
    """
    heads, vectors, d_k, _ = query.shape
    rows, d_v = result.shape[1:]
    parts, cap = -(-(end - begin) // TOKENS), np.float32(softcap)
    sums = np.empty((heads, parts, rows, d_v), np.float32)
    highest = np.empty((heads, parts, vectors * LANES), np.float32)
    totals = np.empty((heads, parts, vectors * LANES), np.float32)
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        first = begin + part * TOKENS
        tokens = min(TOKENS, end - first)
        key_at, value_at = head * key_head + first * key_token, head * value_head + first * value_token
        scores, tile = np.empty(vectors * TOKENS * LANES, np.float32), np.empty(TILE * d_k, np.float32)
        high, total = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32)
        for token in range(0, tokens, TILE):
            at, left = key_at + token * key_token, tokens - token
            prefetch(keys, at + AHEAD * key_token, TILE * d_k)
            prefetch(values, value_at + token * value_token, TILE * d_v)
            if keys.itemsize == 4:
                _score_tile(query[head], keys, at, key_token, left, d_k, scores, token)
            else:
                for j in range(min(TILE, left)):
                    key, wide = keys[at + j * key_token : at + j * key_token + d_k], tile[j * d_k : (j + 1) * d_k]
                    for i in range(d_k):
                        wide[i] = widened(key[i])
                _score_tile(query[head], tile, 0, d_k, left, d_k, scores, token)
        is_edge = first + tokens > end - new or first + window < end
        for vector in range(vectors):
            begun = vector * TOKENS * LANES
            of_vector = scores[begun : begun + -(-tokens // TILE) * STRIP]
            if cap > 0:
                for i in range(len(of_vector)):
                    of_vector[i] = cap * np.tanh(of_vector[i] / cap)
            if is_edge:
                _mask_unseen(of_vector, first, vector, end, new, window)
            _highest(of_vector, high)
            _to_powers(of_vector, high, total)
            for lane in range(LANES):
                highest[head, part, vector * LANES + lane] = high[lane]
                totals[head, part, vector * LANES + lane] = total[lane]
        for row in range(0, rows, ROWS):
            of = row // LANES * TOKENS * LANES + row % LANES
            done = sums[head, part, row:]
            whole = d_v // (VECTORS * LANES) * VECTORS * LANES
            for i in range(0, whole, VECTORS * LANES):
                _add_wide(scores, of, values, value_at + i, value_token, tokens, done, i, d_v)
            for i in range(whole, d_v, LANES):
                _add_vector(scores, of, values, value_at + i, value_token, tokens, done, i, d_v)
    join_parts(highest, totals, sums, sinks, result)


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])", parallel=HAS_THREADS)
def multiply(x: Array, weight: Array, result: Array) -> None:
    """Multiply ``x [rows, size]`` by ``weight [outputs, size]`` into ``result [rows, outputs]``.

    ``rows`` and ``outputs`` are multiples of ``ROWS``, ``size`` of ``LANES``.
    """
    outputs, size = weight.shape
    for part in numba.prange(-(-outputs // OUTPUTS)):
        for output in range(part * OUTPUTS, min(outputs, (part + 1) * OUTPUTS), ROWS):
            for row in range(0, len(x), ROWS):
                _multiply_tile(x, row * size, weight, output * size, size, result, row * outputs + output, outputs)
