"""Products of packed weights with one token's row in integers, as in llama.cpp, compiled by numba.

The row is first rounded to 16 bits, with a step for every 32 numbers; torch's kernel takes it in bfloat16, which has 8.
A processor then needs a few instructions for 32 products. On one thread of an EPYC with AVX2, the 106 million 4-bit
weights of SmolLM2's layers take 20.4 ms, and 29.4 ms with torch's kernel. LLVM does not find these instructions by
itself, so they are written out: on x86 those that add two products, or four (AVX-512 VNNI: 34 us instead of 57 for
3,072 x 576 4-bit weights from memory), elsewhere their equivalents. The layer's operations before and after a product
are part of the same call; torch would need a dozen calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from kvchat.kv.ops.numba.loops import FINITE_OR_NOT, FIRST_CACHE, HAS_THREADS, LINE, build_prefetch, compiled, exp
from kvchat.kv.ops.numba.parts import turn
from kvchat.models.quantize.rows import GELU

Array = np.ndarray[Any, Any]
GROUP = 32  # numbers of the row, and weights of a row of the matrix, that share a step
MOST = 127 * 256  # in 16 bits, so that the upper half is at most 127
HALF = 16  # products of 4 and 8 bits whose sum fits into 16 bits
# Prefetch distances. The scales of consecutive groups of a row are far apart: without prefetching, products from memory
# took 1.2 times as long for SmolLM2's layers and 1.1 times for its head.
GROUPS_AHEAD, BLOCKS_AHEAD = 4, 4
SCALE_BYTES = 4  # a scale and a zero point
GELU_SCALE, GELU_CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
ZERO = 8  # the 4-bit level of the group's zero point
ROW = "f4[::1], f4[::1], f4[::1], f4, f4[::1], i8, f4[::1]"  # arguments of a product after its matrix
NORM = "f4[::1], f4"
MATRICES = "Tuple((u1[:, ::1], i4[:, ::1], i8))", "Tuple((i1[:, ::1], u2[:, ::1]))"  # of 4 and of 8 bits
# The processor adds pairs of products; unknown if numba is set to compile for another one.
PAIRS = llvm.get_host_cpu_features().get("avx2", False) and not numba.config.CPU_NAME
FOURS = PAIRS and llvm.get_host_cpu_features().get("avx512vnni", False)  # adds four products at once
BYTE, SHORT, WORD, SIZE, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


# ---- before and after a product
@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _normalize(x: Array, norm: Array, eps: np.float32) -> None:
    """Apply RMSNorm to ``x [K]`` in place."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + eps)
    for i in range(len(x)):
        x[i] = x[i] * scale * norm[i]


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _rounded(x: Array, norm: Array, eps: np.float32) -> tuple[Array, Array, Array]:
    """Round ``x [K]`` to 16 bits, after normalizing it by ``norm [K]`` unless that is empty.

    Returns the levels ``[K]``, and the steps and the sums of levels of its groups, ``[K / 32]`` each.
    """
    size, groups = len(x), len(x) // GROUP
    levels, steps, sums = np.empty(size, np.int16), np.empty(groups, np.float32), np.empty(groups, np.int32)
    row = x
    if len(norm):
        row = x.copy()
        _normalize(row, norm, eps)
    for group in range(groups):
        most, unknown = np.float32(0), np.float32(0)
        for i in range(GROUP):
            value = row[GROUP * group + i]
            most = max(most, abs(value))
            unknown += value * np.float32(0)  # NaN if a value is not finite, which makes the product NaN
        inverse = np.float32(MOST) / most if most > 0 else np.float32(0)
        total = np.int32(0)
        for i in range(GROUP):
            level = np.int32(np.rint(row[GROUP * group + i] * inverse))
            levels[GROUP * group + i] = level
            total += level
        steps[group], sums[group] = most / np.float32(MOST) + unknown, total
    return levels, steps, sums


@numba.njit  # type: ignore[untyped-decorator]
def _halves(levels: Array) -> tuple[Array, Array]:
    """Split ``levels`` into 8-bit numbers: ``levels = 256 * upper + lower``."""
    upper, lower = np.empty(len(levels), np.int8), np.empty(len(levels), np.int8)
    for i in range(len(levels)):
        level = np.int32(levels[i])
        upper[i] = (level + 128) >> 8
        lower[i] = level - (np.int32(upper[i]) << 8)
    return upper, lower


@numba.njit(fastmath=FINITE_OR_NOT)  # type: ignore[untyped-decorator]
def _finish(rows: Array, bias: Array, residual: Array, gate: int, out: Array) -> None:
    """Add ``bias`` and ``residual`` to ``rows``, unless empty; with ``gate`` write gate(first half) * second half.

    Both gates multiply x by a logistic function: SILU of x itself, GELU (in its tanh form) of a cubic of x.
    """
    for i in range(len(bias)):
        rows[i] += bias[i]
    for i in range(len(residual)):
        rows[i] += residual[i]
    if gate:
        half = len(out)
        for i in range(half):
            x = rows[i]
            if gate == GELU:
                x = GELU_SCALE * (x + GELU_CUBE * x * x * x)
            power = exp(-abs(x))
            sigmoid = (np.float32(1) if x >= 0 else power) / (np.float32(1) + power)
            out[i] = rows[i] * sigmoid * rows[half + i]


# ---- LLVM's instructions
def _vector(kind: ir.Type, width: int) -> ir.VectorType:
    return ir.VectorType(kind, width)


def _part(builder: Any, vector: Any, first: int, width: int) -> Any:
    """Return ``width`` elements of a vector from ``first`` on."""
    mask = ir.Constant(_vector(WORD, width), list(range(first, first + width)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _splat(builder: Any, number: Any, width: int) -> Any:
    """Return a vector whose elements are all ``number``."""
    nothing = ir.Constant(_vector(number.type, width), ir.Undefined)
    one = builder.insert_element(nothing, number, WORD(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_vector(WORD, width), [0] * width))


def _call(builder: Any, name: str, result: ir.Type, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Call one of LLVM's intrinsics."""
    shape = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, shape, name), arguments, fastmath=fastmath)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def _load(builder: Any, array: Any, index: Any, kind: ir.Type, align: int = 1) -> Any:
    """Load a vector from an array, from the element ``index`` on."""
    return builder.load(builder.bitcast(builder.gep(array.data, [index]), kind.as_pointer()), align=align)


def _prefetch(builder: Any, array: Any, index: Any, size: int) -> None:
    """Prefetch ``size`` bytes of an array from the element ``index`` on."""
    pointer = builder.bitcast(builder.gep(array.data, [index]), BYTE.as_pointer())
    for at in range(0, size, LINE):
        build_prefetch(builder, builder.gep(pointer, [SIZE(at)]), FIRST_CACHE)


# ---- 4 bits
def _two_columns(builder: Any, weights: list[Any], levels: list[Any]) -> Any:
    """Multiply two columns of 16 4-bit ``weights`` by one 8-bit level each; return the sums in 16 bits."""
    shorts = _vector(SHORT, 16)
    if PAIRS:
        alternating = ir.Constant(_vector(WORD, 32), [at for row in range(16) for at in (row, 16 + row)])
        both = builder.shuffle_vector(*weights, alternating)
        low = builder.zext(levels[0], SHORT)
        pair = builder.or_(low, builder.shl(builder.zext(levels[1], SHORT), SHORT(8)))
        pairs = builder.bitcast(_splat(builder, pair, 16), both.type)
        return _call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, both, pairs)
    products = [
        builder.mul(builder.zext(column, shorts), _splat(builder, builder.sext(level, SHORT), 16))
        for column, level in zip(weights, levels, strict=True)
    ]
    return builder.add(*products)


def _by_pairs(
    builder: Any, data: Any, begin: Any, width: int, halves: tuple[Any, Any], begin_level: Any
) -> list[list[Any]]:
    """Multiply a group's columns by its levels; return the sums in 32 bits, for each 16 rows one per half."""
    bytes_, words = _vector(BYTE, width), _vector(WORD, 16)
    four, low_half = ir.Constant(bytes_, [4] * width), ir.Constant(bytes_, [15] * width)
    parts = range(2 * width // 16)
    totals: list[list[Any]] = [[ir.Constant(words, [0] * 16)] * 2 for _ in parts]
    for at in range(0, GROUP, HALF):
        sums_of: list[list[Any]] = [[ir.Constant(_vector(SHORT, 16), [0] * 16)] * 2 for _ in parts]
        for column in range(at, at + HALF, 2):
            both = [column, column + 1]
            stored = [_load(builder, data, builder.add(begin, SIZE(each * width)), bytes_) for each in both]
            nibbles = (
                [builder.and_(each, low_half) for each in stored],
                [builder.lshr(each, four) for each in stored],
            )
            rows = [
                [_part(builder, each, start, 16) for each in half] for half in nibbles for start in range(0, width, 16)
            ]
            for which, levels in enumerate(halves):
                places = [builder.add(begin_level, SIZE(each)) for each in both]
                two = [builder.load(builder.gep(levels.data, [place])) for place in places]
                for sums_here, weights in zip(sums_of, rows, strict=True):
                    products = _two_columns(builder, weights, two)
                    sums_here[which] = builder.add(sums_here[which], products)
        for total_of, sums_here in zip(totals, sums_of, strict=True):
            for which in range(2):
                total_of[which] = builder.add(total_of[which], builder.sext(sums_here[which], words))
    return totals


def _by_fours(
    builder: Any, data: Any, begin: Any, width: int, halves: tuple[Any, Any], begin_level: Any
) -> list[list[Any]]:
    """Compute ``_by_pairs`` with instructions that add four products in 32 bits; a column has 32 bytes."""
    bytes_, words = _vector(BYTE, 2 * width), _vector(WORD, 16)
    four, low_half = ir.Constant(words, [4] * 16), ir.Constant(words, [0x0F0F0F0F] * 16)
    totals: list[list[Any]] = [[ir.Constant(words, [0] * 16)] * 2 for _ in range(4)]
    for column in range(0, GROUP, 4):
        stored = [_load(builder, data, builder.add(begin, SIZE(at * width)), bytes_) for at in (column, column + 2)]
        levels = [_load(builder, half, builder.add(begin_level, SIZE(column)), WORD) for half in halves]
        for part in range(2):
            order = [each * width + 16 * part + row for row in range(16) for each in range(4)]
            mask = ir.Constant(_vector(WORD, 2 * width), order)
            both = builder.bitcast(builder.shuffle_vector(*stored, mask), words)
            for upper, weights in enumerate((both, builder.lshr(both, four))):
                at = 2 * upper + part
                columns = builder.and_(weights, low_half)
                for which, level in enumerate(levels):
                    added = totals[at][which], columns, _splat(builder, level, 16)
                    totals[at][which] = _call(builder, "llvm.x86.avx512.vpdpbusd.512", words, *added)
    return totals


def _four_bit_rows(width: int) -> Any:
    """Return the product of 2 * ``width`` rows in torch's layout.

    Byte i of a column holds the level of row i in its lower half, and that of row ``width`` + i in its upper half.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def product(
        _context: Any, data: Any, scales: Any, upper: Any, lower: Any, steps: Any, sums: Any, out: Any, block: Any
    ) -> Any:
        return types.void(data, scales, upper, lower, steps, sums, out, block), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, scales, upper, lower, steps, sums, out = (
            context.make_array(kind)(context, builder, argument)
            for kind, argument in zip(signature.args[:7], arguments[:7], strict=True)
        )
        groups, all_rows = (builder.extract_value(scales.shape, axis) for axis in range(2))
        first_row = builder.mul(arguments[7], SIZE(2 * width))
        first = builder.mul(builder.mul(arguments[7], groups), SIZE(GROUP * width))
        words, floats = _vector(WORD, 16), _vector(FLOAT, 16)
        eight = ir.Constant(words, [8] * 16)
        parts = range(2 * width // 16)  # of 16 rows each
        found = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * 16)) for _ in parts]
        with cgutils.for_range(builder, groups) as loop:
            begin = builder.add(first, builder.mul(loop.index, SIZE(GROUP * width)))
            begin_level = builder.mul(loop.index, SIZE(GROUP))
            soon = builder.add(builder.mul(builder.add(loop.index, SIZE(GROUPS_AHEAD)), all_rows), first_row)
            _prefetch(builder, scales, soon, 2 * width * SCALE_BYTES)
            _prefetch(builder, data, builder.add(begin, SIZE(GROUPS_AHEAD * GROUP * width)), GROUP * width)
            group_totals = _by_fours if FOURS and width == 32 else _by_pairs
            totals = group_totals(builder, data, begin, width, (upper, lower), begin_level)
            step, total = (builder.load(builder.gep(array.data, [loop.index])) for array in (steps, sums))
            middle = _splat(builder, builder.mul(total, WORD(ZERO)), 16)
            of_zero = _splat(builder, builder.fmul(builder.sitofp(total, FLOAT), step), 16)
            for part in parts:
                place = builder.add(builder.mul(loop.index, all_rows), builder.add(first_row, SIZE(16 * part)))
                pairs = _load(builder, scales, place, words, align=4)  # in bfloat16: a scale, then its zero point
                scale = builder.bitcast(builder.shl(pairs, ir.Constant(words, [16] * 16)), floats)
                zero = builder.bitcast(builder.and_(pairs, ir.Constant(words, [-(2**16)] * 16)), floats)
                whole = builder.add(builder.shl(totals[part][0], eight), totals[part][1])
                product_of = builder.fmul(builder.sitofp(builder.sub(whole, middle), floats), _splat(builder, step, 16))
                with_scale = _multiply_add(builder, product_of, scale, builder.load(found[part]))
                builder.store(_multiply_add(builder, zero, of_zero, with_scale), found[part])
        for part in parts:
            place = builder.gep(out.data, [builder.add(first_row, SIZE(16 * part))])
            builder.store(builder.load(found[part]), builder.bitcast(place, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return product


_NARROW, _WIDE = _four_bit_rows(16), _four_bit_rows(32)


@compiled(f"void(u1[:, ::1], i4[:, ::1], i8, {ROW})", parallel=HAS_THREADS)
def four_bit_product(
    data: Array,
    scales: Array,
    width: int,
    x: Array,
    bias: Array,
    norm: Array,
    eps: np.float32,
    residual: Array,
    gate: int,
    out: Array,
) -> None:
    """Multiply ``x [K]`` by the levels ``data [N, K / 2]``, which torch packed in columns of ``width`` bytes.

    ``scales [K / 32, N]`` are the bits of each group's scale and zero point in bfloat16. N is a multiple of 2 * width.
    x is first normalized by ``norm [K]``; ``bias [N]`` and ``residual [N]`` are added to ``out [N]``; each may be
    empty. With ``gate`` (``SILU`` or ``GELU``, else 0) ``out [N / 2]`` is the gate of the first half times the second
    half.
    """
    levels, steps, sums = _rounded(x, norm, eps)
    upper, lower = _halves(levels)
    rows = np.empty(scales.shape[1], np.float32) if gate else out
    for block in numba.prange(scales.shape[1] // (2 * width)):
        if width == 16:
            _NARROW(data, scales, upper, lower, steps, sums, rows, block)
        else:
            _WIDE(data, scales, upper, lower, steps, sums, rows, block)
    _finish(rows, bias, residual, gate, out)


@compiled("void(u1[:, ::1], f4[:, :, ::1], i8, f4[:, ::1])", parallel=HAS_THREADS)
def unpack_four_bits(data: Array, scales: Array, width: int, out: Array) -> None:
    """Unpack ``data [N, K / 2]`` to weights ``out [N, K]``; ``scales [K / 32, N, 2]`` are scales and zero points."""
    columns, groups = out.shape[1], len(scales)
    blocks = data.reshape(-1, columns, width)
    for block in numba.prange(len(blocks)):
        for group in range(groups):
            for byte in range(width):
                low, high = 2 * width * block + byte, 2 * width * block + width + byte
                for column in range(GROUP * group, GROUP * (group + 1)):
                    both = np.int32(blocks[block, column, byte])
                    out[low, column] = np.float32((both & 15) - ZERO) * scales[group, low, 0] + scales[group, low, 1]
                    out[high, column] = np.float32((both >> 4) - ZERO) * scales[group, high, 0] + scales[group, high, 1]


# ---- 8 bits
def _thirty_two(builder: Any, weights: Any, levels: Any) -> Any:
    """Multiply 32 16-bit ``weights`` and ``levels``; return eight sums in 32 bits."""
    eight = _vector(WORD, 8)
    if PAIRS:
        halves = [[_part(builder, each, at, 16) for each in (weights, levels)] for at in (0, 16)]
        return builder.add(*(_call(builder, "llvm.x86.avx2.pmadd.wd", eight, *half) for half in halves))
    words = _vector(WORD, 32)
    products = builder.mul(builder.sext(weights, words), builder.sext(levels, words))
    quarters = [_part(builder, products, at, 8) for at in range(0, 32, 8)]
    return builder.add(builder.add(*quarters[:2]), builder.add(*quarters[2:]))


def _eight_bit_rows(rows: int) -> Any:
    """Return the product of ``rows`` rows, read in parallel so that the processor prefetches each."""

    @intrinsic  # type: ignore[untyped-decorator]
    def product(_context: Any, data: Any, scale: Any, levels: Any, steps: Any, out: Any, first: Any) -> Any:
        return types.void(data, scale, levels, steps, out, first), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, scale, levels, steps, out = (
            context.make_array(kind)(context, builder, argument)
            for kind, argument in zip(signature.args[:5], arguments[:5], strict=True)
        )
        bytes_, shorts, floats = _vector(BYTE, GROUP), _vector(SHORT, GROUP), _vector(FLOAT, 8)
        groups = builder.extract_value(scale.shape, 1)
        starts = [builder.mul(builder.add(arguments[5], SIZE(row)), groups) for row in range(rows)]
        found = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * 8)) for _ in range(rows)]
        with cgutils.for_range(builder, groups) as loop:
            values = _load(builder, levels, builder.mul(loop.index, SIZE(GROUP)), shorts)
            step = builder.load(builder.gep(steps.data, [loop.index]))
            for start, sum_of in zip(starts, found, strict=True):
                group = builder.add(start, loop.index)
                soon = builder.add(group, builder.mul(groups, SIZE(BLOCKS_AHEAD * rows)))
                _prefetch(builder, data, builder.mul(soon, SIZE(GROUP)), GROUP)
                weights = builder.sext(_load(builder, data, builder.mul(group, SIZE(GROUP)), bytes_), shorts)
                products = builder.sitofp(_thirty_two(builder, weights, values), floats)
                # A nonnegative float16 shifted by 13 bits is a float32 whose exponent is too small by 112.
                half = builder.zext(builder.load(builder.gep(scale.data, [group])), WORD)
                small = builder.bitcast(builder.shl(half, WORD(13)), FLOAT)
                scaled = builder.fmul(builder.fmul(small, FLOAT(2.0**112)), step)
                total = _multiply_add(builder, products, _splat(builder, scaled, 8), builder.load(sum_of))
                builder.store(total, sum_of)
        for row, sum_of in enumerate(found):
            added = FLOAT(0.0), builder.load(sum_of)
            total = _call(builder, "llvm.vector.reduce.fadd.v8f32", FLOAT, *added, fastmath=("reassoc",))
            builder.store(total, builder.gep(out.data, [builder.add(arguments[5], SIZE(row))]))
        return context.get_dummy_value()

    return product


_FOUR_ROWS, _ONE_ROW = _eight_bit_rows(4), _eight_bit_rows(1)


@compiled(f"void(i1[:, ::1], u2[:, ::1], {ROW})", parallel=HAS_THREADS)
def eight_bit_product(
    data: Array,
    scale: Array,
    x: Array,
    bias: Array,
    norm: Array,
    eps: np.float32,
    residual: Array,
    gate: int,
    out: Array,
) -> None:
    """Compute ``four_bit_product`` for ``data [N, K]``; ``scale [N, K / 32]`` are float16 bits per group."""
    levels, steps, _ = _rounded(x, norm, eps)
    rows = np.empty(len(data), np.float32) if gate else out
    fours = len(data) // 4
    for four in numba.prange(fours):
        _FOUR_ROWS(data, scale, levels, steps, rows, 4 * four)
    for row in range(4 * fours, len(data)):
        _ONE_ROW(data, scale, levels, steps, rows, row)
    _finish(rows, bias, residual, gate, out)


# ---- a layer without its attention
def multiply(matrix: Any, x: Array, bias: Array, norm: Array, eps: Any, residual: Array, gate: int, out: Array) -> None:
    """Multiply by a ``matrix`` from ``PackedRows.arrays``; other arguments as in ``four_bit_product``."""


@overload(multiply)  # type: ignore[untyped-decorator]
def _multiply(
    matrix: Any, x: Any, bias: Any, norm: Any, eps: Any, residual: Any, gate: Any, out: Any
) -> Callable[..., None]:
    def of_four_bits(matrix: Any, x: Any, bias: Any, norm: Any, eps: Any, residual: Any, gate: Any, out: Any) -> None:
        four_bit_product(matrix[0], matrix[1], matrix[2], x, bias, norm, eps, residual, gate, out)

    def of_eight_bits(matrix: Any, x: Any, bias: Any, norm: Any, eps: Any, residual: Any, gate: Any, out: Any) -> None:
        eight_bit_product(matrix[0], matrix[1], x, bias, norm, eps, residual, gate, out)

    return of_four_bits if len(matrix) == 3 else of_eight_bits


@compiled(
    *(
        f"void({kind}, f4[::1], {NORM}, f4[:, ::1], f4, f4, f4[::1], f4[::1], f4[::1], i8, i8, f4[:, ::1])"
        for kind in MATRICES
    )
)
def begin_layer(
    matrix: Any,
    bias: Array,
    norm: Array,
    eps: np.float32,
    of_heads: Array,
    query_eps: np.float32,
    key_eps: np.float32,
    hidden: Array,
    cos: Array,
    sin: Array,
    queries: int,
    keys: int,
    heads: Array,
) -> None:
    """Compute one token's queries, keys and values ``heads [n, d]`` from ``hidden [K]``, normalized by ``norm [K]``.

    ``matrix`` and ``bias`` are merged from those of all three. Each of the ``queries`` and ``keys`` is normalized by
    its row of ``of_heads [queries + keys, d]``, which may be ``[0, d]``, and rotated by ``cos`` and ``sin [d]``.
    """
    multiply(matrix, hidden, bias, norm, eps, np.empty(0, np.float32), 0, heads.reshape(-1))
    for head in range(len(of_heads)):
        _normalize(heads[head], of_heads[head], query_eps if head < queries else key_eps)
    turn(heads[: queries + keys], cos, sin)


@numba.njit  # type: ignore[untyped-decorator]
def _add_product(matrix: Any, x: Array, bias: Array, norm: Array, eps: np.float32, residual: Array, out: Array) -> None:
    """Write ``residual`` plus the product of ``x`` with a matrix, normalized by ``norm`` unless that is empty."""
    none = np.empty(0, np.float32)
    if not len(norm):
        multiply(matrix, x, bias, none, eps, residual, 0, out)
        return
    multiply(matrix, x, bias, none, eps, none, 0, out)
    _normalize(out, norm, eps)
    for i in range(len(out)):
        out[i] += residual[i]


@compiled(
    *(
        f"void({kind}, f4[::1], {NORM}, {kind}, {NORM}, i8, {kind}, f4[::1], {NORM}, f4[::1], f4[::1], f4[::1])"
        for kind in MATRICES
    )
)
def end_layer(
    output: Any,
    output_bias: Array,
    attention_norm: Array,
    attention_eps: np.float32,
    gate_up: Any,
    norm: Array,
    eps: np.float32,
    gate: int,
    down: Any,
    down_bias: Array,
    mlp_norm: Array,
    mlp_eps: np.float32,
    attended: Array,
    hidden: Array,
    out: Array,
) -> None:
    """Compute one token's layer after attention: ``out [K]`` from its input ``hidden [K]`` and its heads' ``attended``.

    ``output`` is the matrix after attention; ``gate_up`` and ``down`` are those of the MLP, whose input is normalized
    by ``norm [K]``. ``attention_norm`` and ``mlp_norm``, ``[K]`` or empty, normalize what attention and MLP add.
    """
    none, after = np.empty(0, np.float32), np.empty_like(hidden)
    _add_product(output, attended, output_bias, attention_norm, attention_eps, hidden, after)
    active = np.empty(len(gate_up[0]) // 2, np.float32)
    multiply(gate_up, after, none, norm, eps, none, gate, active)
    _add_product(down, active, down_bias, mlp_norm, mlp_eps, after, out)
