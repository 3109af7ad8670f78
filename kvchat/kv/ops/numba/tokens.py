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
from kvchat.kv.ops.numba.loops import (
    FINITE_OR_NOT,
    HAS_THREADS,
    LINE,
    Array,
    add_atomically,
    compiled,
    exp,
    prefetch,
    widened,
)
from kvchat.kv.ops.numba.parts import TINY, join_parts

LANES = 16
TOGETHER = 4  # query heads whose sums stay in registers; each number of them takes 0.3 s to compile
PART = 16  # pages that one thread scores at a time
BLOCK = 8  # tokens that are left out together, where none of them can be chosen
HIGHEST = 2**31 - 1
ATTENDED = 128  # tokens that one thread attends to at a time
AHEAD = 16  # tokens before they are due they are asked for
STORED = "number[::1], i8, i8, number[::1], i8, i8"  # keys and values, each with two strides
ATTENDS_WITH = f"f4[:, :, ::1], f8, f8, f4[:, ::1], {STORED}, i4[:, :], f4[:, :, ::1]"


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
    query: Array, scaling: float, codes: Array, edges: Array, width: int, bits: int, scores: Array, excess: Array
) -> None:
    """One head's ``query [G, d_k]`` times ``scaling`` and the keys of the pages ``codes [pages, words]``.

    ``edges`` is the same memory in bfloat16. Into ``scores [G, pages * PAGE]``, and ``key_codes.excess [G, pages]``.
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
            base, squares = np.float32(0), np.float32(0)
            for i in range(d):
                base += query[g, i] * low[i]
                parts[g, i] = query[g, i] * high[i]
                squares += parts[g, i] * parts[g, i]
            bases[g], excess[g, page] = base, squares / np.float32(24)
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


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _weights(powers: Array, highest: Array, totals: Array, low: int, high: int) -> Array:
    """The weights of the tokens ``low`` up to ``high`` of those with ``powers [G, n]``, added up over the group.

    ``powers`` are less the ``highest [G, part]`` score of their part, and ``totals [G, part]`` are their sums. What
    fills up a block is -1.
    """
    weights = np.full(-(-(high - low) // BLOCK) * BLOCK, np.float32(-1))
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
    """How many of ``bits`` are higher than ``bound``."""
    limit, count = np.int32(bound), np.int32(0)
    for i in range(len(bits)):
        count = np.int32(count + np.int32(bits[i] > limit))
    return int(count)


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
    """``selection.of_unread`` of one head, for ``join_parts``: into ``highest`` and ``totals [G]``, ``total [G, d_v]``.

    Args:
        powers: e to the power of the scores ``[G, n]``, less the highest of their part ``parts [G, part]``; what is
            read is set to 0.
        parts: as ``powers`` says.
        excess: of each page ``[G, page]``.
        means: the mean values of the same pages ``[page, d_v]``, in bfloat16.
        tokens: what is read; of those beyond the last page is no score.
        start: the first token of the first page.
        seen: the first token meant, counted from there.
    """
    group, n = powers.shape
    masses = excess  # it is no longer needed
    for g in range(group):
        powers[g, :seen] = 0
        for token in tokens:
            if start <= token < start + n:
                powers[g, token - start] = 0
        highest[g], totals[g] = _highest(parts[g]), 0
        for page in range(n // PAGE):
            masses[g, page] = exp(parts[g, page // PART] - highest[g] - excess[g, page])
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
) -> None:
    """One head's attention of ``query [G, d_k]`` over some ``tokens``, for ``join_parts``.

    Into ``highest`` and ``totals [G]``, and the sums ``total [G, d_v]``.
    """
    group, d_v = total.shape
    d_k = query.shape[1]
    weights = np.empty((group, len(tokens)), np.float32)
    for at in range(len(tokens)):
        soon = max(tokens[min(at + AHEAD, len(tokens) - 1)], 0)
        key_at, value_at = first_key + soon * key_token, first_value + soon * value_token
        for i in range(0, d_k, LINE // keys.itemsize):
            prefetch(keys, key_at + i)
        for i in range(0, d_v, LINE // values.itemsize):
            prefetch(values, value_at + i)
        start = first_key + max(tokens[at], 0) * key_token  # EMPTY, where scores are no numbers
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
    """``attend_tokens`` over the tokens that each head chooses, which it writes to ``table``; return how many.

    They are, of those from ``seen`` up to ``end``, all outside the candidates, all that are pinned, and the ``k >= 1``
    of highest weight. In ``table [H, n]`` they are ascending, then EMPTY. What the others would add is joined.

    Each thread takes the next task when it is done with one: to score a part of a head's tokens, and after the last of
    them to choose for that head; then to attend to some of what was chosen. To wait for one another between these
    steps, as loops in a row do, took SmolLM2's threads as long as the steps.

    Args:
        asking: what chooses, float32 ``[H, G, d_k]``.
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
        means: the pages' mean values ``[H, page, d_v]`` in bfloat16; ``[H, 0, 0]`` where nothing is joined.
        attends: 0 if nothing is attended to, and ``result`` only has what the other tokens would add.
        query, scaling, softcap, sinks, keys, key_head, key_token, values, value_head, value_token, table: as in
            ``attend_tokens``.
        result: float32 ``[H, G, d_v]``, or with a column more as in ``join_parts``; written.
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
    for _ in numba.prange(heads * (parts + read)):
        task = add_atomically(taken, 0, 1)
        while task < heads * (parts + read):
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
                    if joins:
                        among = excess[head], means[head, begin : begin + pages], table[head, :named], begin * PAGE
                        beside = most[head, read], whole[head, read], sums[head, read]
                        _add_unread(scores[head], highest[head], *among, low, *beside)
                    add_atomically(scored, head, 1)
            else:
                head, part = (task - heads * parts) // read, (task - heads * parts) % read
                while add_atomically(scored, head, 0) <= parts:  # another thread has taken what is lacking
                    pass
                tokens = table[head, part * ATTENDED : min(named, (part + 1) * ATTENDED)]
                attended = most[head, part], whole[head, part], sums[head, part]
                lie = keys, head * key_head, key_token, values, head * value_head, value_token
                _attend_part(query[head], scale, cap, *lie, tokens, *attended)
            task = add_atomically(taken, 0, 1)
    if read + joins:
        join_parts(most, whole, sums, sinks, result)
    return int(named)


@compiled(f"void({ATTENDS_WITH}, i8)", parallel=HAS_THREADS)
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
) -> None:
    """One token's attention over the tokens that each head names, where they are stored.

    Args:
        query: float32 ``[H, G, d_k]``.
        scaling: the layer's attention scale.
        softcap: of the layer, 0 where there is none.
        sinks: learned logits ``[H, G]``, or ``[0, 0]``.
        keys: the memory from the first key on, whose next head and next token lie so many numbers further.
        key_head: as ``keys`` says.
        key_token: as ``keys`` says.
        values: as keys.
        value_head: as keys.
        value_token: as keys.
        table: int32 ``[H, n]``, all of them tokens.
        result: float32 ``[H, G, d_v]``, written.
        as_part: 1 if ``result`` has a column more, as in ``join_parts``; else 0.
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
        lie = keys, head * key_head, key_token, values, head * value_head, value_token
        of_part = highest[head, part], totals[head, part], sums[head, part]
        _attend_part(query[head], scale, cap, *lie, tokens, *of_part)
    join_parts(highest, totals, sums, sinks, result)
