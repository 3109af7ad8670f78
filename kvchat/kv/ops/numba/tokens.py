"""Choosing tokens one by one by an index of their keys in a few bits, compiled by numba.

A page of the index is a row of 32-bit words: codes ``[width / per, PAGE]``, then the lowest and the highest key of each
channel in bfloat16. A token's word holds its codes of ``per = 32 / bits`` channels, so that a page's tokens are scored
side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvchat.kv.geometry import PAGE
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops.numba.loops import FINITE_OR_NOT, HAS_THREADS, LINE, Array, compiled, exp, prefetch, widened
from kvchat.kv.ops.numba.parts import TINY, join_parts

LANES = 16
TOGETHER = 4  # query heads whose sums stay in registers; each number of them takes 0.3 s to compile
PART = 16  # pages that one thread scores at a time
BLOCK = 8  # tokens that are left out together, where none of them can be chosen
HIGHEST = 2**31 - 1
ATTENDED = 128  # tokens that one thread attends to at a time
AHEAD = 16  # tokens before they are due they are asked for


def _multiplier(bits: int) -> Callable[..., Any]:
    """The loop over a page's codes of ``bits`` bits, in vectors: the compiler's own takes three times as long."""

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        _context: Any, codes: Any, words: Any, parts: Any, bases: Any, group: Any, scores: Any, at: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, parts, bases, scores = (
                context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2, 3, 5)
            )
            words, group, at = (arguments[i] for i in (1, 4, 6))
            width, stride = (
                builder.sdiv(builder.extract_value(rows.strides, 0), words.type(4)) for rows in (parts, scores)
            )
            done = builder.append_basic_block("done")
            cases = builder.switch(group, done)
            for heads in range(1, TOGETHER + 1):
                block = builder.append_basic_block(f"heads{heads}")
                cases.add_case(group.type(heads), block)
                builder.position_at_end(block)
                sums = _multiplied(builder, bits, heads, codes.data, words, parts.data, width, bases.data)
                for g, of_page in enumerate(sums):
                    for half, total in enumerate(of_page):
                        place = builder.add(at, builder.mul(stride, words.type(g)))
                        place = builder.add(place, words.type(half * LANES))
                        builder.store(total, _vector(builder, scores.data, place, total.type), align=4)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(codes, words, parts, bases, group, scores, at), generate

    made: Callable[..., Any] = multiply
    return made


def _vector(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _multiplied(
    builder: Any, bits: int, heads: int, codes: Any, words: Any, parts: Any, width: Any, bases: Any
) -> list[list[Any]]:
    """``bases [heads] + parts [heads, width] @ codes [width, PAGE]``, in vectors."""
    whole, real = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
    number, halves = words.type, range(0, PAGE, LANES)

    def spread(pointer: Any, index: Any) -> Any:
        one = builder.insert_element(real(ir.Undefined), builder.load(builder.gep(pointer, [index])), ir.IntType(32)(0))
        return builder.shuffle_vector(one, one, whole([0] * LANES))

    begun = [[spread(bases, number(g))] * len(halves) for g in range(heads)]
    before = builder.block
    loop, end = builder.append_basic_block("words"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    word = builder.phi(number)
    word.add_incoming(number(0), before)
    totals = [[builder.phi(real) for _ in halves] for _ in range(heads)]
    sums = [list(of) for of in totals]
    start = builder.mul(word, number(PAGE))
    rows = [builder.load(_vector(builder, codes, builder.add(start, number(half)), whole), align=4) for half in halves]
    channel = builder.mul(word, number(32 // bits))
    for i in range(32 // bits):
        shift, mask = whole([i * bits] * LANES), whole([(1 << bits) - 1] * LANES)
        values = [builder.sitofp(builder.and_(builder.lshr(row, shift), mask), real) for row in rows]
        for g, of in enumerate(sums):
            weight = spread(parts, builder.add(builder.mul(width, number(g)), builder.add(channel, number(i))))
            for half, value in enumerate(values):
                product = builder.fmul(weight, value, flags=("contract",))
                of[half] = builder.fadd(of[half], product, flags=("contract",))
    following = builder.add(word, number(1))
    word.add_incoming(following, loop)
    for phis, first, last in zip(totals, begun, sums, strict=True):
        for phi, value, result in zip(phis, first, last, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, words), loop, end)
    builder.position_at_end(end)
    return sums


_multiply_2, _multiply_4 = _multiplier(2), _multiplier(4)


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _score_pages(
    query: Array, scaling: float, codes: Array, edges: Array, width: int, bits: int, scores: Array
) -> None:
    """One head's ``query [G, d_k]`` times ``scaling`` and the keys of the pages ``codes [pages, words]``.

    ``edges`` is the same memory in bfloat16. Into ``scores [G, pages * PAGE]``.
    """
    group, d = query.shape
    words = width * bits // 32
    edge = edges.shape[1] - 2 * width
    scale, step = np.float32(scaling), np.float32(scaling / ((1 << bits) - 1))
    parts, bases = np.zeros((group, width), np.float32), np.empty(group, np.float32)
    low, high = np.empty(d, np.float32), np.empty(d, np.float32)
    for page in range(len(codes)):
        lowest, highest = edges[page, edge : edge + width], edges[page, edge + width :]
        for i in range(d):
            low[i] = widened(lowest[i]) * scale
            high[i] = (widened(highest[i]) - widened(lowest[i])) * step
        for g in range(group):
            base = np.float32(0)
            for i in range(d):
                base += query[g, i] * low[i]
                parts[g, i] = query[g, i] * high[i]
            bases[g] = base
        for g in range(0, group, TOGETHER):
            heads = min(TOGETHER, group - g)
            if bits == 2:
                _multiply_2(codes[page], words, parts[g:], bases[g:], heads, scores[g:], page * PAGE)
            else:
                _multiply_4(codes[page], words, parts[g:], bases[g:], heads, scores[g:], page * PAGE)


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _highest(scores: Array) -> Any:
    lanes = np.empty(LANES, np.float32)  # a maximum is no sum: the compiler finds none by itself
    lanes[:] = scores[0]
    whole = len(scores) // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = scores[i + lane] if scores[i + lane] > lanes[lane] else lanes[lane]
    highest = lanes[0]  # ``max`` of an array takes half a second to compile
    for lane in range(LANES):
        highest = max(highest, lanes[lane])
    for i in range(whole, len(scores)):
        highest = max(highest, scores[i])
    return highest


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _to_powers(scores: Array, highest: Any) -> Any:
    """Replace ``scores`` by e to their power, less ``highest``; their sum."""
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - highest)
        total += scores[i]
    return total


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _add_share(powers: Array, share: Any, weights: Array) -> None:
    for i in range(len(powers)):
        weights[i] += powers[i] * share


@numba.njit  # type: ignore[untyped-decorator]
def _above(bits: Array, bound: int) -> int:
    """How many of ``bits`` are higher than ``bound``."""
    limit, count = np.int32(bound), np.int32(0)
    for i in range(len(bits)):
        count = np.int32(count + np.int32(bits[i] > limit))
    return count


@numba.njit  # type: ignore[untyped-decorator]
def _threshold(bits: Array, k: int) -> tuple[int, int]:
    """A number that is at most the ``k``-th highest of ``bits``, and how many of its equals are among the k.

    The others of the k are higher. ``bits`` are those of weights that are not negative. Bit by bit: to count 16 at a
    time, 31 times at most, takes less than sorting, or counting what falls in each of many bins.
    """
    bound = 0
    for bit in range(30, -1, -1):
        count = _above(bits, (bound | 1 << bit) - 1)
        if count >= k:
            bound |= 1 << bit
        if count == k:
            break
    return bound, k - _above(bits, bound)


@numba.njit  # type: ignore[untyped-decorator]
def _list_read(bits: Array, seen: int, first: int, last: int, end: int, k: int, pinned: Array, table: Array) -> int:
    """Write to ``table`` the tokens that one KV head reads, ascending, then EMPTY; return how many they are.

    ``bits`` are those of the weights of tokens ``first`` to ``last``, and negative ones that fill up a block; all
    others from ``seen`` up to ``end`` are read.
    """
    for token in range(first, min(len(pinned), last + 1)):
        if pinned[token]:
            bits[token - first] = HIGHEST
            k += 1
    # k blocks have a token as high as the k-th highest of what is the highest in each: in others none is chosen.
    best = np.empty(len(bits) // BLOCK, np.int32)
    for block in range(len(best)):
        highest = bits[block * BLOCK]
        for i in range(1, BLOCK):
            highest = max(highest, bits[block * BLOCK + i])
        best[block] = highest
    least = _threshold(best, k)[0] if len(best) > k else 0
    some, places, found = np.empty(len(bits) + 1, np.int32), np.empty(len(bits) + 1, np.int32), 0
    for block in range(len(best)):
        if best[block] >= least:
            for i in range(BLOCK):
                place = block * BLOCK + i
                # The next overwrites what is too low: a branch would be guessed wrong.
                some[found], places[found] = bits[place], place
                found += bits[place] >= least
    bound, equals = _threshold(some[:found], k) if found > k else (least, found)
    n = 0
    for token in range(seen, first):
        table[n] = token
        n += 1
    for i in range(found):
        equal = (some[i] == bound) & (equals > 0)
        equals -= equal
        table[n] = first + places[i]
        n += (some[i] > bound) | equal
    for token in range(last + 1, end):
        table[n] = token
        n += 1
    table[n:] = EMPTY
    return n


@compiled(
    "i8(f4[:, :, ::1], f8, u4[:, :, ::1], u2[:, :, ::1], i8, i8, i8, i8, i8, i8, i8, i8, b1[::1], i4[:, ::1])",
    parallel=HAS_THREADS,
)
def choose_tokens(
    query: Array,
    scaling: float,
    codes: Array,
    edges: Array,
    width: int,
    bits: int,
    known: int,
    seen: int,
    first: int,
    last: int,
    end: int,
    k: int,
    pinned: Array,
    table: Array,
) -> int:
    """Write to ``table [H, n]`` the tokens that each head reads, ascending, then EMPTY; return how many.

    Of those from ``seen`` up to ``end`` they are all outside the candidates, all that are pinned, and the ``k >= 1`` of
    highest weight.

    Args:
        query: float32 ``[H, G, d_k]``.
        scaling: the layer's attention scale.
        codes: ``[H, page, words]``, the index.
        edges: the same memory in bfloat16.
        width: channels of a token's codes, d_k and what fills up a word.
        bits: of a code.
        known: the first token that is not in the index; whole pages.
        seen: the first token that may be read.
        first: the first candidate.
        last: the last one, not before the first, and known.
        end: the first token that may not be read.
        k: tokens to choose.
        pinned: bool ``[tokens]``, of which there may be fewer.
        table: int32, written.
    """
    heads, group, _ = query.shape
    begin = seen // PAGE
    pages = known // PAGE - begin
    parts = -(-pages // PART)
    low, high = seen - begin * PAGE, pages * PAGE
    low_chosen, high_chosen = first - begin * PAGE, last + 1 - begin * PAGE
    scores = np.empty((heads, group, pages * PAGE), np.float32)
    highest, totals = np.empty((heads, group, parts), np.float32), np.zeros((heads, group, parts), np.float32)
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        start, stop = part * PART, min(pages, (part + 1) * PART)
        at = slice(begin + start, begin + stop)
        of_part = scores[head, :, start * PAGE : stop * PAGE]
        _score_pages(query[head], scaling, codes[head, at], edges[head, at], width, bits, of_part)
        for g in range(group):
            highest[head, g, part] = _highest(scores[head, g, max(low, start * PAGE) : min(high, stop * PAGE)])
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        some = slice(max(low, part * PART * PAGE), min(high, (part + 1) * PART * PAGE))
        for g in range(group):
            totals[head, g, part] = _to_powers(scores[head, g, some], _highest(highest[head, g]))
    count = np.empty(heads, np.int64)
    for head in numba.prange(heads):
        weights = np.full(-(-(high_chosen - low_chosen) // BLOCK) * BLOCK, np.float32(-1))
        weights[: high_chosen - low_chosen] = 0
        for g in range(group):
            _add_share(scores[head, g, low_chosen:high_chosen], np.float32(1) / (totals[head, g].sum() + TINY), weights)
        count[head] = _list_read(weights.view(np.int32), seen, first, last, end, k, pinned, table[head])
    return int(count[0])


@compiled(
    "void(f4[:, :, ::1], f8, number[::1], i8, i8, number[::1], i8, i8, i8, i4[:, :], f8, f4[:, ::1], f4[:, :, ::1])",
    fastmath=FINITE_OR_NOT,
    parallel=HAS_THREADS,
)
def attend_tokens(
    query: Array,
    scaling: float,
    keys: Array,
    key_head: int,
    key_token: int,
    values: Array,
    value_head: int,
    value_token: int,
    d_v: int,
    table: Array,
    softcap: float,
    sinks: Array,
    result: Array,
) -> None:
    """One token's attention over the tokens that each head names, where they are stored.

    Args:
        query: float32 ``[H, G, d_k]``.
        scaling: the layer's attention scale.
        keys: the memory from the first key on, whose next head and next token lie so many numbers further.
        values: as keys.
        d_v: numbers of a value.
        table: int32 ``[H, n]``, all of them tokens.
        softcap: of the layer, 0 where there is none.
        sinks: learned logits ``[H, G]``, or ``[0, 0]``.
        result: float32 ``[H, G, d_v]``, written; or with a column more, as in ``join_parts``.
    """
    heads, group, _ = result.shape
    n, d_k = table.shape[1], query.shape[2]
    parts = -(-n // ATTENDED)
    sums = np.zeros((heads, parts, group, d_v), np.float32)
    highest, totals = np.empty((heads, parts, group), np.float32), np.empty((heads, parts, group), np.float32)
    cap, scale = np.float32(softcap), np.float32(scaling)
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        tokens = table[head, part * ATTENDED : min(n, (part + 1) * ATTENDED)]
        weights = np.empty((group, len(tokens)), np.float32)
        for at in range(len(tokens)):
            soon = max(tokens[min(at + AHEAD, len(tokens) - 1)], 0)
            key_at, value_at = head * key_head + soon * key_token, head * value_head + soon * value_token
            for i in range(0, d_k, LINE // keys.itemsize):
                prefetch(keys, key_at + i)
            for i in range(0, d_v, LINE // values.itemsize):
                prefetch(values, value_at + i)
            start = head * key_head + max(tokens[at], 0) * key_token  # EMPTY, where scores are no numbers
            key = keys[start : start + d_k]
            for g in range(group):
                score = np.float32(0)
                for i in range(d_k):
                    score += query[head, g, i] * widened(key[i])
                weights[g, at] = score * scale
        for g in range(group):
            if cap > 0:
                for at in range(len(tokens)):
                    weights[g, at] = cap * np.tanh(weights[g, at] / cap)
            highest[head, part, g] = _highest(weights[g])
            totals[head, part, g] = _to_powers(weights[g], highest[head, part, g])
        total = sums[head, part]
        starts = np.empty(len(tokens), np.int64)
        for at in range(len(tokens)):
            starts[at] = head * value_head + max(tokens[at], 0) * value_token
        whole = len(tokens) - len(tokens) % 4
        # Four tokens at once: the sums are read and written a quarter as often.
        for at in range(0, whole, 4):
            v0, v1 = values[starts[at] : starts[at] + d_v], values[starts[at + 1] : starts[at + 1] + d_v]
            v2, v3 = values[starts[at + 2] : starts[at + 2] + d_v], values[starts[at + 3] : starts[at + 3] + d_v]
            for g in range(group):
                w = weights[g, at : at + 4]
                for i in range(d_v):
                    two = w[0] * widened(v0[i]) + w[1] * widened(v1[i])
                    total[g, i] += two + w[2] * widened(v2[i]) + w[3] * widened(v3[i])
        for at in range(whole, len(tokens)):
            value = values[starts[at] : starts[at] + d_v]
            for g in range(group):
                for i in range(d_v):
                    total[g, i] += weights[g, at] * widened(value[i])
    join_parts(highest, totals, sums, sinks, result)
