"""Choosing single tokens by an index of quantized keys, and attending to them, compiled by numba.

A page of the index is a row of 32-bit words: codes ``[width / per, PAGE]``, then the lowest and the highest key of each
channel in bfloat16. A word has one token's codes of ``per = 32 / bits`` channels, so that the tokens of a page are
scored in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvchat.kv.geometry import PAGE
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops.numba.loops import (
    FINITE_OR_NOT,
    HAS_THREADS,
    Array,
    add_atomically,
    compiled,
    exp,
    prefetch,
    widened,
)
from kvchat.kv.ops.numba.parts import TINY, join_parts

LANES = 16
TOGETHER = 4  # query heads whose sums stay in registers; 0.3 s to compile for each number of heads
PART = 16  # pages per scoring task of a thread
HIGHEST = 2**31 - 1
BLOCKS = 2  # blocks per chosen token: the k-th highest of their maxima is a bound that about 1.3 k tokens reach
ROUGH = 15  # low bits of a weight that this bound ignores
# Whether to use the instruction that moves selected lanes to the front; numba may compile for another processor.
COMPRESSES = llvm.get_host_cpu_features().get("avx512f", False) and not numba.config.CPU_NAME
ATTENDED = 128  # tokens per attending task of a thread
AHEAD = 12  # prefetch distance in tokens
PAGES_AHEAD = 4  # prefetch distance in pages; without it, scoring SmolLM2 took 1.3 times as long
STORED = "number[::1], i8, i8, number[::1], i8, i8"  # keys and values, each with two strides
ATTENDS_WITH = f"f4[:, :, ::1], f8, f8, f4[:, ::1], {STORED}, i4[:, :], f4[:, :, ::1]"


def _multiplier(bits: int) -> Callable[..., Any]:
    """Return a vectorized loop over a page's codes of ``bits`` bits; the compiler's own takes three times as long."""

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        _context: Any, codes: Any, edges: Any, words: Any, query: Any, group: Any, scores: Any, excess: Any, at: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, edges, query, scores, excess = (
                context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 1, 3, 5, 6)
            )
            words, group, at = (arguments[i] for i in (2, 4, 7))
            stride, of_pages = (
                builder.sdiv(builder.extract_value(rows.strides, 0), words.type(4)) for rows in (scores, excess)
            )
            page = builder.sdiv(at, at.type(PAGE))
            done = builder.append_basic_block("done")
            cases = builder.switch(group, done)
            for heads in range(1, TOGETHER + 1):
                block = builder.append_basic_block(f"heads{heads}")
                cases.add_case(group.type(heads), block)
                builder.position_at_end(block)
                sums, squares = _multiplied(builder, bits, heads, codes.data, edges.data, words, query.data)
                for g, of_page in enumerate(sums):
                    place = builder.add(page, builder.mul(of_pages, words.type(g)))
                    builder.store(squares[g], builder.gep(excess.data, [place]))
                    for half, total in enumerate(of_page):
                        place = builder.add(at, builder.mul(stride, words.type(g)))
                        place = builder.add(place, words.type(half * LANES))
                        builder.store(total, _vector(builder, scores.data, place, total.type), align=4)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(codes, edges, words, query, group, scores, excess, at), generate

    made: Callable[..., Any] = multiply
    return made


def _vector(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _multiplied(
    builder: Any, bits: int, heads: int, codes: Any, edges: Any, words: Any, query: Any
) -> tuple[list[list[Any]], list[Any]]:
    """Generate the scores of a page's tokens for the queries of ``heads`` heads, and the page's ``key_codes.excess``.

    The product of a query and a key ``low + code * step`` is ``query * low``, the same for all tokens, plus ``code``
    times the weight ``query * step``. So each word first computes the weights of its channels.
    """
    per = 32 // bits
    whole, real = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
    channels, bfloat16 = ir.VectorType(ir.FloatType(), per), ir.VectorType(ir.IntType(16), per)
    number, halves, together = words.type, range(0, PAGE, LANES), {"flags": ("contract",)}
    weights = cgutils.alloca_once(builder, channels, size=heads)

    def spread(value: Any) -> Any:
        one = builder.insert_element(real(ir.Undefined), value, ir.IntType(32)(0))
        return builder.shuffle_vector(one, one, whole([0] * LANES))

    before = builder.block
    loop, end = builder.append_basic_block("words"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    word = builder.phi(number)
    word.add_incoming(number(0), before)
    totals = [[builder.phi(real) for _ in halves] for _ in range(heads)]
    bases, begun = ([builder.phi(channels) for _ in range(heads)] for _ in range(2))
    sums, sums_of_low, squares = [list(of) for of in totals], list(bases), list(begun)
    channel, width = builder.mul(word, number(per)), builder.mul(words, number(per))
    place = builder.add(builder.mul(words, number(2 * PAGE)), channel)  # in 16-bit units
    stored = (_vector(builder, edges, at, bfloat16) for at in (place, builder.add(place, width)))
    wide = (builder.zext(builder.load(edge, align=2), ir.VectorType(ir.IntType(32), per)) for edge in stored)
    low, high = (builder.bitcast(builder.shl(edge, edge.type([16] * per)), channels) for edge in wide)
    step = builder.fmul(builder.fsub(high, low), channels([1 / ((1 << bits) - 1)] * per))
    for g in range(heads):
        at = builder.add(builder.mul(width, number(g)), channel)
        asked = builder.load(_vector(builder, query, at, channels), align=4)
        sums_of_low[g] = builder.fadd(sums_of_low[g], builder.fmul(asked, low, **together), **together)
        weight = builder.fmul(asked, step)
        squares[g] = builder.fadd(squares[g], builder.fmul(weight, weight, **together), **together)
        builder.store(weight, builder.gep(weights, [number(g)]))
    start = builder.mul(word, number(PAGE))
    rows = [builder.load(_vector(builder, codes, builder.add(start, number(half)), whole), align=4) for half in halves]
    ones = builder.bitcast(weights, ir.FloatType().as_pointer())
    for i in range(per):
        shift, mask = whole([i * bits] * LANES), whole([(1 << bits) - 1] * LANES)
        values = [builder.sitofp(builder.and_(builder.lshr(row, shift), mask), real) for row in rows]
        for g, of in enumerate(sums):
            weight = spread(builder.load(builder.gep(ones, [number(g * per + i)])))
            for half, value in enumerate(values):
                of[half] = builder.fadd(of[half], builder.fmul(weight, value, **together), **together)
    following = builder.add(word, number(1))
    word.add_incoming(following, loop)
    for phi, last in zip(chain(bases, begun, *totals), chain(sums_of_low, squares, *sums), strict=True):
        phi.add_incoming(phi.type([0.0] * phi.type.count), before)
        phi.add_incoming(last, loop)
    builder.cbranch(builder.icmp_signed("<", following, words), loop, end)
    builder.position_at_end(end)
    shape = ir.FunctionType(ir.FloatType(), [ir.FloatType(), channels])
    added = cgutils.get_or_insert_function(builder.module, shape, f"llvm.vector.reduce.fadd.v{per}f32")

    def sum_of(values: Any) -> Any:
        return builder.call(added, [ir.FloatType()(0.0), values], fastmath=("reassoc",))

    for g, of in enumerate(sums):
        base = spread(sum_of(sums_of_low[g]))
        sums[g] = [builder.fadd(total, base) for total in of]
    return sums, [builder.fmul(sum_of(each), ir.FloatType()(1 / 24)) for each in squares]


_multiply_2, _multiply_4 = _multiplier(2), _multiplier(4)


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _score_pages(
    query: Array, scaling: float, codes: Array, edges: Array, width: int, bits: int, scores: Array, excess: Array
) -> None:
    """Score pages ``codes [pages, words]`` for one head's ``query [G, d_k]`` times ``scaling``.

    ``edges`` is the same memory as bfloat16. Writes ``scores [G, pages * PAGE]`` and ``key_codes.excess [G, pages]``.
    """
    group, d = query.shape
    words, scale = width * bits // 32, np.float32(scaling)
    asked = np.zeros((group, width), np.float32)
    for g in range(group):
        for i in range(d):
            asked[g, i] = query[g, i] * scale
    for page in range(len(codes)):
        prefetch(codes, (page + PAGES_AHEAD) * codes.shape[1], codes.shape[1])
        for g in range(0, group, TOGETHER):
            heads = min(TOGETHER, group - g)
            if bits == 2:
                _multiply_2(codes[page], edges[page], words, asked[g:], heads, scores[g:], excess[g:], page * PAGE)
            else:
                _multiply_4(codes[page], edges[page], words, asked[g:], heads, scores[g:], excess[g:], page * PAGE)


@numba.njit  # type: ignore[untyped-decorator]
def _highest(scores: Array) -> Any:
    """Return the maximum, found as integers in the same order: the compiler does not vectorize a float maximum."""
    bits, most = scores.view(np.int32), np.int32(-HIGHEST)
    for i in range(len(bits)):
        most = max(most, np.int32(bits[i] ^ np.int32((bits[i] >> 31) & HIGHEST)))
    return np.int32(most ^ np.int32((most >> 31) & HIGHEST)).view(np.float32)


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _to_powers(scores: Array, highest: Any) -> Any:
    """Replace ``scores`` by ``exp(scores - highest)``; return their sum."""
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - highest)
        total += scores[i]
    return total


@numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
def _add_share(powers: Array, share: Any, weights: Array) -> None:
    for i in range(len(powers)):
        weights[i] += powers[i] * share


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _weights(powers: Array, highest: Array, totals: Array, low: int, high: int) -> Array:
    """Return the weights of the tokens ``low`` up to ``high``, summed over the group, padded to a vector with -1.

    ``powers [G, n]`` are exponentials of scores less the ``highest [G, part]`` of their part; ``totals`` are their
    sums.
    """
    weights = np.full(-(-(high - low) // LANES) * LANES, np.float32(-1))
    weights[: high - low] = 0
    for g in range(len(powers)):
        most, total = _highest(highest[g]), TINY
        for part in range(totals.shape[1]):
            total += totals[g, part] * exp(highest[g, part] - most)
        for part in range(totals.shape[1]):
            share = exp(highest[g, part] - most) / total
            start, stop = max(low, part * PART * PAGE), min(high, (part + 1) * PART * PAGE)
            _add_share(powers[g, start:stop], share, weights[start - low :])
    return weights


@numba.njit  # type: ignore[untyped-decorator]
def _above(bits: Array, bound: int) -> int:
    """Count the ``bits`` that are higher than ``bound``."""
    limit, count = np.int32(bound), np.int32(0)
    for i in range(len(bits)):
        count = np.int32(count + np.int32(bits[i] > limit))
    return int(count)


@numba.njit  # type: ignore[untyped-decorator]
def _threshold(bits: Array, k: int, last: int) -> tuple[int, int]:
    """Return a bound that is at most the ``k``-th highest of ``bits``, and how many equal to it are among the ``k``.

    The rest of the ``k`` are higher. ``bits`` are those of nonnegative weights. Finds the bound bit by bit, down to bit
    ``last``: counting 16 numbers at a time, 31 times at most, is faster than sorting or building a histogram.
    """
    bound = 0
    for bit in range(30, last - 1, -1):
        count = _above(bits, (bound | 1 << bit) - 1)
        if count >= k:
            bound |= 1 << bit
        if count == k:
            break
    return bound, k - _above(bits, bound)


@intrinsic  # type: ignore[untyped-decorator]
def _keep(_context: Any, bits: Any, at: Any, least: Any, some: Any, places: Any, found: Any) -> Any:
    """Append those of 16 ``bits`` from ``at`` on that are at least ``least`` to ``some``, their indices to ``places``.

    ``found`` is the number of entries before; returns the number after. Both arrays need room for 16 more.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, some, places = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 3, 4))
        at, least, found = (arguments[i] for i in (1, 2, 5))
        word, mask = ir.IntType(32), ir.IntType(LANES)
        whole = ir.VectorType(word, LANES)

        def spread(value: Any) -> Any:
            one = builder.insert_element(whole(ir.Undefined), builder.trunc(value, word), word(0))
            return builder.shuffle_vector(one, one, whole([0] * LANES))

        numbers = builder.load(_vector(builder, bits.data, at, whole), align=4)
        kept = builder.icmp_signed(">=", numbers, spread(least))
        where = builder.add(spread(at), whole(list(range(LANES))))
        count = builder.zext(builder.ctpop(builder.bitcast(kept, mask)), found.type)
        if COMPRESSES:
            shape = ir.FunctionType(whole, [whole, whole, kept.type])
            name = f"llvm.x86.avx512.mask.compress.v{LANES}i32"
            compress = cgutils.get_or_insert_function(builder.module, shape, name)
            for array, values in ((some, numbers), (places, where)):
                front = builder.call(compress, [values, whole([0] * LANES), kept])
                builder.store(front, _vector(builder, array.data, found, whole), align=4)
        else:
            with builder.if_then(builder.icmp_signed(">", count, count.type(0))):
                place = found
                for lane in range(LANES):  # the next lane overwrites a rejected one: a branch would be mispredicted
                    for array, values in ((some, numbers), (places, where)):
                        builder.store(builder.extract_element(values, word(lane)), builder.gep(array.data, [place]))
                    place = builder.add(place, builder.zext(builder.extract_element(kept, word(lane)), place.type))
        return builder.add(found, count)

    return types.int64(bits, types.int64, types.int64, some, places, types.int64), generate


@numba.njit  # type: ignore[untyped-decorator]
def _list_read(bits: Array, seen: int, first: int, last: int, end: int, k: int, pinned: Array, table: Array) -> int:
    """Write the tokens that one KV head reads to ``table``, ascending, padded with EMPTY; return their number.

    ``bits`` are of the weights of tokens ``first`` to ``last``, padded with negative ones. All other tokens from
    ``seen`` up to ``end`` are read.
    """
    for token in range(first, min(len(pinned), last + 1)):
        if pinned[token]:
            bits[token - first] = HIGHEST
            k += 1
    blocks, least = -(-BLOCKS * k // LANES) * LANES, 0
    if len(bits) >= 2 * blocks:
        best = bits[:blocks].copy()
        for start in range(blocks, len(bits) - blocks + 1, blocks):
            others = bits[start : start + blocks]
            for i in range(blocks):
                best[i] = max(best[i], others[i])
        least = _threshold(best, k, ROUGH)[0]
    some, places = np.empty(len(bits) + LANES, np.int32), np.empty(len(bits) + LANES, np.int32)
    found = 0
    for at in range(0, len(bits), LANES):
        found = _keep(bits, at, least, some, places, found)
    bound, equals = _threshold(some[:found], k, 0) if found > k else (least, found)
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


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _add_unread(
    powers: Array,
    parts: Array,
    excess: Array,
    means: Array,
    tokens: Array,
    start: int,
    seen: int,
    highest: Array,
    totals: Array,
    total: Array,
) -> None:
    """Compute ``selection.unread_part`` of one head: ``highest [G]``, ``totals [G]``, ``total [G, d_v]`` for joining.

    Args:
        powers: exponentials ``[G, n]`` of scores less their part's maximum; those of tokens that are read are set to 0.
        parts: maximum score of each part, ``[G, part]``.
        excess: of each page ``[G, page]``; overwritten.
        means: mean values of the same pages ``[page, d_v]``, in bfloat16.
        tokens: tokens that are read; those after the last page have no score.
        start: first token of the first page.
        seen: first token that counts, relative to ``start``.
    """
    group, n = powers.shape
    masses = excess
    for g in range(group):
        powers[g, :seen] = 0
        for token in tokens:
            if start <= token < start + n:
                powers[g, token - start] = 0
        highest[g], totals[g] = _highest(parts[g]), 0
        for part in range(parts.shape[1]):
            of_part, most = masses[g, part * PART : (part + 1) * PART], parts[g, part] - highest[g]
            for i in range(len(of_part)):
                of_part[i] = exp(most - of_part[i])
        for page in range(n // PAGE):
            mass = np.float32(0)
            for i in range(PAGE):
                mass += powers[g, page * PAGE + i]
            masses[g, page] *= mass
            totals[g] += masses[g, page]
    total[:] = 0
    value = np.empty(total.shape[1], np.float32)
    for page in range(n // PAGE):
        for i in range(len(value)):
            value[i] = widened(means[page, i])
        for g in range(group):
            mass = masses[g, page]
            for i in range(len(value)):
                total[g, i] += mass * value[i]


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _attend_part(
    query: Array,
    scale: Any,
    cap: Any,
    keys: Array,
    first_key: int,
    key_token: int,
    values: Array,
    first_value: int,
    value_token: int,
    tokens: Array,
    highest: Array,
    totals: Array,
    total: Array,
) -> Array:
    """Attend with one head's ``query [G, d_k]`` to some ``tokens``, for ``join_parts``.

    Writes ``highest`` and ``totals [G]`` and the sums ``total [G, d_v]``; returns ``exp(scores - highest) [G, n]``.
    """
    group, d_v = total.shape
    d_k = query.shape[1]
    weights = np.empty((group, len(tokens)), np.float32)
    for token in tokens[:AHEAD]:
        prefetch(keys, first_key + max(token, 0) * key_token, d_k)
        prefetch(values, first_value + max(token, 0) * value_token, d_v)
    for at in range(len(tokens)):
        soon = max(tokens[min(at + AHEAD, len(tokens) - 1)], 0)
        prefetch(keys, first_key + soon * key_token, d_k)
        prefetch(values, first_value + soon * value_token, d_v)
        start = first_key + max(tokens[at], 0) * key_token  # EMPTY if scores are NaN
        key = keys[start : start + d_k]
        for g in range(group):
            score = np.float32(0)
            for i in range(d_k):
                score += query[g, i] * widened(key[i])
            weights[g, at] = score * scale
    for g in range(group):
        if cap > 0:
            for at in range(len(tokens)):
                weights[g, at] = cap * np.tanh(weights[g, at] / cap)
        highest[g] = _highest(weights[g])
        totals[g] = _to_powers(weights[g], highest[g])
    total[:] = 0
    starts = np.empty(len(tokens), np.int64)
    for at in range(len(tokens)):
        starts[at] = first_value + max(tokens[at], 0) * value_token
    whole = len(tokens) - len(tokens) % 4
    # Four tokens at a time: the sums are read and written a quarter as often.
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
    return weights


@compiled(
    f"i8(f4[:, :, ::1], u4[:, :, ::1], u2[:, :, ::1], i8, i8, i8, i8, i8, i8, i8, i8, b1[::1], u2[:, :, ::1], i8, "
    f"{ATTENDS_WITH})",
    parallel=HAS_THREADS,
)
def choose_and_attend(
    asking: Array,
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
    means: Array,
    attends: int,
    query: Array,
    scaling: float,
    softcap: float,
    sinks: Array,
    keys: Array,
    key_head: int,
    key_token: int,
    values: Array,
    value_head: int,
    value_token: int,
    table: Array,
    result: Array,
) -> int:
    """Choose tokens for each head, write them to ``table``, and ``attend_tokens``; return their number.

    A head reads, of the tokens from ``seen`` up to ``end``, all outside the candidates, all pinned ones, and the ``k``
    candidates of highest weight, at least one. ``table [H, n]`` lists them in ascending order, padded with EMPTY. An
    estimate of the attention to the other tokens is joined.

    Threads take one task after another: to score a part of a head's tokens and, after the head's last part, to choose;
    then to attend to some of the chosen tokens, or to add up the others. With a parallel loop per step, SmolLM2's
    threads spent as long waiting for each other as computing.

    Args:
        asking: query that chooses, float32 ``[H, G, d_k]``.
        codes: the index, ``[H, page, words]``.
        edges: the same memory as bfloat16.
        width: channels of a token's codes, d_k rounded up to whole words.
        bits: bits per code.
        known: first token that is not in the index; whole pages.
        seen: first token that may be read.
        first: first candidate.
        last: last candidate, at least ``first`` and below ``known``.
        end: first token that may not be read.
        k: number of tokens to choose.
        pinned: bool ``[tokens]``, possibly shorter.
        means: mean value of each page, ``[H, page, d_v]`` in bfloat16; ``[H, 0, 0]`` to join nothing.
        attends: 0 to attend to nothing, so that ``result`` only has the estimate for the other tokens.
        query, scaling, softcap, sinks, keys, key_head, key_token, values, value_head, value_token, table: as in
            ``attend_tokens``.
        result: output, float32 ``[H, G, d_v]``, or with one more column as in ``join_parts``.
    """
    heads, group = asking.shape[:2]
    joins = int(means.shape[1] > 0)
    begin = seen // PAGE
    pages = known // PAGE - begin
    parts = -(-pages // PART)
    low, low_chosen, high_chosen = seen - begin * PAGE, first - begin * PAGE, last + 1 - begin * PAGE
    named = first - seen + k + pinned[first : last + 1].sum() + end - last - 1
    read = -(-named // ATTENDED) if attends else 0
    d_v = result.shape[2] if attends else means.shape[2]
    scores, excess = np.empty((heads, group, pages * PAGE), np.float32), np.empty((heads, group, pages), np.float32)
    highest, totals = np.empty((heads, group, parts), np.float32), np.empty((heads, group, parts), np.float32)
    joined = heads, read + joins, group
    most, whole, sums = np.empty(joined, np.float32), np.empty(joined, np.float32), np.empty((*joined, d_v), np.float32)
    scored, taken = np.zeros(heads, np.int64), np.zeros(1, np.int64)
    cap, scale = np.float32(softcap), np.float32(scaling)
    then = read + joins  # tasks per head after choosing
    for _ in numba.prange(heads * (parts + then)):
        task = add_atomically(taken, 0, 1)
        while task < heads * (parts + then):
            if task < heads * parts:
                head, part = task // parts, task % parts
                start, stop = part * PART, min(pages, (part + 1) * PART)
                at = slice(begin + start, begin + stop)
                of_part = scores[head, :, start * PAGE : stop * PAGE]
                of_pages = codes[head, at], edges[head, at], width, bits, of_part, excess[head, :, start:stop]
                _score_pages(asking[head], scaling, *of_pages)
                for g in range(group):
                    of_head = scores[head, g, max(low, start * PAGE) : stop * PAGE]
                    highest[head, g, part] = _highest(of_head)
                    totals[head, g, part] = _to_powers(of_head, highest[head, g, part])
                if add_atomically(scored, head, 1) == parts - 1:
                    bits_of = _weights(scores[head], highest[head], totals[head], low_chosen, high_chosen)
                    _list_read(bits_of.view(np.int32), seen, first, last, end, k, pinned, table[head])
                    add_atomically(scored, head, 1)
            else:
                head, part = (task - heads * parts) // then, (task - heads * parts) % then
                while add_atomically(scored, head, 0) <= parts:  # another thread is working on the missing part
                    pass
                made = most[head, part], whole[head, part], sums[head, part]
                if part < joins:
                    among = excess[head], means[head, begin : begin + pages], table[head, :named], begin * PAGE
                    _add_unread(scores[head], highest[head], *among, low, *made)
                else:
                    at_token = (part - joins) * ATTENDED
                    tokens = table[head, at_token : min(named, at_token + ATTENDED)]
                    stored = keys, head * key_head, key_token, values, head * value_head, value_token
                    _attend_part(query[head], scale, cap, *stored, tokens, *made)
            task = add_atomically(taken, 0, 1)
    if read + joins:
        join_parts(most, whole, sums, sinks, result)
    return int(named)


@compiled(f"void({ATTENDS_WITH}, i8, f4[:, :, ::1])", parallel=HAS_THREADS)
def attend_tokens(
    query: Array,
    scaling: float,
    softcap: float,
    sinks: Array,
    keys: Array,
    key_head: int,
    key_token: int,
    values: Array,
    value_head: int,
    value_token: int,
    table: Array,
    result: Array,
    as_part: int,
    weights: Array,
) -> None:
    """Compute one token's attention over the tokens in each head's table, in place.

    Args:
        query: float32 ``[H, G, d_k]``.
        scaling: the layer's attention scale.
        softcap: the layer's, or 0.
        sinks: learned logits ``[H, G]``, or ``[0, 0]``.
        keys, key_head, key_token: memory from the first key on, with the strides of heads and tokens in numbers.
        values, value_head, value_token: as keys.
        table: int32 ``[H, n]``, without EMPTY.
        result: output, float32 ``[H, G, d_v]``.
        as_part: 1 if ``result`` has one more column, as in ``join_parts``; else 0.
        weights: output if there is that column, float32 ``[H, G, n]``; else ``[0, 0, 0]``.
    """
    heads, group, columns = result.shape
    n, d_v = table.shape[1], columns - as_part
    parts = -(-n // ATTENDED)
    sums = np.empty((heads, parts, group, d_v), np.float32)
    highest, totals = np.empty((heads, parts, group), np.float32), np.empty((heads, parts, group), np.float32)
    cap, scale = np.float32(softcap), np.float32(scaling)
    for task in numba.prange(heads * parts):
        head, part = task // parts, task % parts
        tokens = table[head, part * ATTENDED : min(n, (part + 1) * ATTENDED)]
        stored = keys, head * key_head, key_token, values, head * value_head, value_token
        of_part = highest[head, part], totals[head, part], sums[head, part]
        powers = _attend_part(query[head], scale, cap, *stored, tokens, *of_part)
        if len(weights):
            for g in range(group):
                for i in range(len(tokens)):  # an array assignment takes seconds to compile
                    weights[head, g, part * ATTENDED + i] = powers[g, i]
    join_parts(highest, totals, sums, sinks, result)
    for head in range(len(weights)):
        for g in range(group):
            for part in range(parts):
                share = exp(highest[head, part, g] - result[head, g, d_v])
                for at in range(part * ATTENDED, min(n, (part + 1) * ATTENDED)):
                    weights[head, g, at] *= share
