"""The loops behind ``cpu_ops``, compiled by numba.

Choosing, moving and opening a layer's pages is some forty operations on a few hundred numbers: in torch and in numpy
their number is what they cost, in one loop the numbers are. The first process of a machine compiles them, for some
seconds; later ones read numba's cache, beside this file or in the user's cache folder.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvchat.kv.memory.device_slots import EMPTY

Array = np.ndarray[Any, Any]
Loop = Callable[..., Any]

# Of ``exp``; the products of the high part and whole numbers are exact.
LN_2, LN_2_HIGH, LN_2_LOW = map(np.float32, (math.log(2), 0.693359375, -2.12194440e-4))
SERIES = tuple(map(np.float32, (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5)))
LEAST_EXPONENT = np.float32(-87.33)
# What LLVM may do where it divides: took it all numbers for finite, a model's infinities would be a division by zero.
FINITE_OR_NOT = {"reassoc", "contract", "nsz", "arcp"}
FLOAT32, BFLOAT16 = "f4", "u2"  # as numpy sees them, which knows no bfloat16
LINE = 64  # bytes of memory that a processor fetches at once
# The arguments of LLVM's prefetch. Into the first cache few lines can be under way at once: 5,000 scattered tokens took
# 1.4 times as long.
FOR_READING, SECOND_CACHE, DATA = 0, 2, 1


def _has_threads() -> bool:
    """True if numba can share a loop among OpenMP's threads.

    Its own must not be asked from two threads at once, and two OpenMPs in one process are harmless with GNU's alone.
    """
    if sys.platform != "linux":
        return False
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:  # this machine has no OpenMP
        return False
    numba.config.THREADING_LAYER = "omp"
    return True


HAS_THREADS = _has_threads()
_used = threading.local()
_in_float32_only: list[tuple[Any, str]] = []  # loops over stored numbers, and their signatures


def compiled(signature: str, fastmath: bool | set[str] = False, parallel: bool = False) -> Callable[[Loop], Loop]:
    """Compile a loop for ``signature``, once for all processes where there is room for it on disk.

    ``number`` in a signature is what K and V are stored in: float32, and bfloat16 after ``compile_for_bfloat16``.
    """
    options = {"nogil": True, "fastmath": fastmath, "parallel": parallel}
    exact = signature.replace("number", FLOAT32)

    def compile_loop(loop: Loop) -> Loop:
        try:
            compiled: Loop = numba.njit(exact, cache=True, **options)(loop)
        except (OSError, RuntimeError):  # a full disk; no folder that may be written
            compiled = numba.njit(exact, **options)(loop)
        if exact != signature:
            _in_float32_only.append((compiled, signature))
        return compiled

    return compile_loop


def compile_for_bfloat16() -> None:
    """Let the imported loops over stored numbers take bfloat16 too: once as long again, where no cache holds them."""
    while _in_float32_only:
        loop, signature = _in_float32_only.pop()
        loop.disable_compile(False)
        with suppress(OSError):  # a full disk: it is compiled, but not kept
            loop.compile(signature.replace("number", BFLOAT16))
        loop.disable_compile()


@intrinsic  # type: ignore[untyped-decorator]
def widened(_context: Any, number: Any) -> Any:
    """A stored number as float32: bfloat16 is its upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    def as_it_is(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return types.float32(number), generate if number == types.uint16 else as_it_is


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, array: Any, index: Any) -> Any:
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


def use_threads(threads: int) -> None:
    """Set the number of threads of this thread's parallel loops; numba's own number is the most."""
    if HAS_THREADS and getattr(_used, "threads", 0) != threads:  # numba takes 5 us to set what is set
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _used.threads = threads


def _start_threads() -> None:
    """Start numba's threads, one for each processor: OpenMP counts them as torch's number, which stays what it was."""
    threads = torch.get_num_threads()
    use_threads(1)
    torch.set_num_threads(threads)


_start_threads()


@compiled("i8(i4[:, ::1], i4[:, ::1], i8, f4[:, ::1])")
def open_slots(table: Array, attended: Array, first: int, bias: Array) -> int:
    """``DeviceSlots.bias`` of ``table [H, n]``, from token ``first`` on; how many are read."""
    heads, n = table.shape
    read = 0
    for head in range(heads):
        for slot in range(n):
            attended[head, slot] = table[head, slot]
            opened = table[head, slot] >= first
            read += opened
            bias[head, slot] = 0 if opened else -np.inf
    return read


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


@compiled("void(f4[:, :, ::1], number[:, :, ::1], f4, f4[:, :, ::1])")
def page_scores(query: Array, bounds: Array, scaling: float, scores: Array) -> None:
    """``selection.page_scores`` into ``scores [H, G, page]``: ``query [H, G, d_k]``, ``bounds [H, page, 2 * d_k]``."""
    for head in range(len(query)):
        score_pages(query[head], bounds[head], scaling, scores[head])


@numba.njit(fastmath={"contract"})  # type: ignore[untyped-decorator]  # no more, or the two parts of ln 2 become one
def exp(x: Any) -> Any:
    """e to the power of ``x <= 0`` in float32, right to its last place; below the smallest normal number that one.

    The C library takes one number at a time, which was half of what choosing pages cost. Cody and Waite's way: a power
    of two, which is a bfloat16, times a polynomial of what is left (the coefficients of Cephes' expf).
    """
    x = max(x, LEAST_EXPONENT)
    twos = np.floor(x / LN_2 + np.float32(0.5))
    x = x - twos * LN_2_HIGH - twos * LN_2_LOW
    series = SERIES[0]
    for coefficient in SERIES[1:]:
        series = series * x + coefficient
    return (series * x * x + x + np.float32(1)) * widened(np.uint16((np.int32(twos) + 127) << 7))


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


@numba.njit  # type: ignore[untyped-decorator]
def find_best(weights: Array, first: int, wanted: Array, best: Array) -> None:
    """The numbers, counted from ``first``, of the highest ``weights`` and these; EMPTY where there are no more."""
    found = 0
    for i in range(len(weights)):
        if found < len(wanted):
            found += 1
        elif weights[i] <= best[-1]:
            continue
        rank = found - 1
        while rank > 0 and weights[i] > best[rank - 1]:
            wanted[rank], best[rank] = wanted[rank - 1], best[rank - 1]
            rank -= 1
        wanted[rank], best[rank] = first + i, weights[i]
    wanted[found:] = EMPTY


@numba.njit  # type: ignore[untyped-decorator]
def _place(wanted: Array, resident: Array, kept: Array, placed: Array) -> None:
    """``selection.assign_slots`` of one head; ``wanted`` is used up."""
    for slot in range(len(resident)):
        kept[slot], placed[slot] = False, EMPTY
    for i in range(len(wanted)):
        for slot in range(len(resident)):
            if resident[slot] == wanted[i] != EMPTY:
                kept[slot], placed[slot], wanted[i] = True, wanted[i], EMPTY
                break
    slot = 0
    for page in wanted:
        if page != EMPTY:
            while kept[slot]:
                slot += 1
            placed[slot] = page
            slot += 1


@compiled("void(f4[:, :, ::1], i8, i8, i8[:, ::1], i8[:, ::1])")
def choose(scores: Array, first: int, last: int, resident: Array, placed: Array) -> None:
    """``TorchOps.choose`` among the pages ``first`` to ``last`` (at least one), all heads, into ``placed [H, k]``."""
    heads, group, _ = scores.shape
    k, pages = resident.shape[1], last - first + 1
    weights, powers, best = np.empty(pages, np.float32), np.empty(pages, np.float32), np.empty(k, np.float32)
    wanted, kept = np.empty(k, np.int64), np.empty(k, np.bool_)
    for head in range(heads):
        weights[:] = 0
        for g in range(group):
            add_softmax(scores[head, g, first : last + 1], weights, powers)
        find_best(weights, first, wanted, best)
        _place(wanted, resident[head], kept, placed[head])


@compiled("void(i8[:, :, ::1], i4[:, :, ::1], i8, i8, i8)")
def open_pages(pages: Array, table: Array, page_size: int, first: int, last: int) -> None:
    """``DeviceSlots.open_pages`` of ``pages [layers, H, k]`` in ``table [layers, H, n]``."""
    layers, heads, k = pages.shape
    for layer in range(layers):
        for head in range(heads):
            for slot in range(k):
                start = pages[layer, head, slot] * page_size  # of an empty slot below first
                for i in range(page_size):
                    token = start + i
                    table[layer, head, slot * page_size + i] = token if first <= token <= last else EMPTY


@compiled("void(i8[:, ::1], i8[:, :, :, ::1], i8, i8, i8, i8[::1], i8[:, :], i8[:, ::1], i8, i8[::1])")
def move_pages(
    source: Array,
    target: Array,
    page_stride: int,
    head_stride: int,
    value_stride: int,
    heads: Array,
    placed: Array,
    resident: Array,
    tokens: int,
    counters: Array,
) -> None:
    """Copy the pages ``placed [H, k]`` of KV ``heads [H]`` that are not ``resident [H, k]``, of ``tokens`` tokens each.

    From ``source [block, word]``, by its strides in blocks, to ``target [2, H, slot, word]``; a word is 8 bytes. The
    K/V pairs moved and wanted are added to ``counters [2]``.
    """
    size = source.shape[1]
    for head in range(len(heads)):
        for slot in range(placed.shape[1]):
            page = placed[head, slot]
            if page == EMPTY:
                continue
            counters[1] += tokens
            if page == resident[head, slot]:
                continue
            counters[0] += tokens
            for kind in range(2):
                block = page * page_stride + heads[head] * head_stride + kind * value_stride
                for i in range(size):
                    target[kind, head, slot, i] = source[block, i]


@compiled("void(u1[:, ::1], u1[:, ::1], i8[:, :], i8, i8[:, :], i8, b1[:, :])")
def move_rows(
    source: Array, target: Array, rows: Array, value_rows: int, to: Array, value_to: int, changed: Array
) -> None:
    """Copy keys from ``rows [H, n]`` of ``source [row, byte]`` to rows ``to [H, n]`` of ``target``, where ``changed``.

    The values lie ``value_rows`` and ``value_to`` rows further.
    """
    for head in range(len(changed)):
        for slot in range(changed.shape[1]):
            if changed[head, slot]:
                for kind in range(2):
                    row, into = rows[head, slot] + kind * value_rows, to[head, slot] + kind * value_to
                    for i in range(source.shape[1]):
                        target[into, i] = source[row, i]


@compiled("void(f4[:, ::1], f4[::1], f4[::1])")
def rotate(heads: Array, cos: Array, sin: Array) -> None:
    """Turn the ``heads [n, d]`` of one token by ``cos`` and ``sin [d]``, first half against second half."""
    half = heads.shape[1] // 2
    for head in range(len(heads)):
        for i in range(half):
            low, high = heads[head, i], heads[head, half + i]
            heads[head, i] = low * cos[i] - high * sin[i]
            heads[head, half + i] = high * cos[half + i] + low * sin[half + i]
