"""Shared by all compiled loops: compiling them with numba, sharing them among threads, and ``exp``.

They are compiled once per machine, in separate processes (``compile_ahead``). Others read numba's cache, next to these
files or in the user's cache folder.
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

Array = np.ndarray[Any, Any]
Loop = Callable[..., Any]

# For ``exp``; products of LN_2_HIGH and integers are exact.
LN_2, LN_2_HIGH, LN_2_LOW = map(np.float32, (math.log(2), 0.693359375, -2.12194440e-4))
SERIES = tuple(map(np.float32, (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5)))
LEAST_EXPONENT = np.float32(-87.33)
# What LLVM may assume in loops that divide. If it assumed finite numbers, a model's infinities would divide by zero.
FINITE_OR_NOT = {"reassoc", "contract", "nsz", "arcp"}
FLOAT32, BFLOAT16 = "f4", "u2"  # numpy has no bfloat16
LINE = 64  # bytes that a processor fetches at once
# The arguments of LLVM's prefetch. Few fetches into the first cache can be in flight: with it, attending to 5,000
# scattered tokens took 1.4 times as long.
FOR_READING, SECOND_CACHE, FIRST_CACHE, DATA = 0, 2, 3, 1


def _has_threads() -> bool:
    """Return True if numba can share a loop among OpenMP's threads.

    Two threads must not use numba's own threads at once. Two OpenMPs in one process are only harmless with GNU's.
    """
    if sys.platform != "linux":
        return False
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:  # no OpenMP on this machine
        return False
    numba.config.THREADING_LAYER = "omp"
    return True


HAS_THREADS = _has_threads()
# What numba would parallelize besides ``prange``: array expressions, each as its own loop. That does not pay for a few
# numbers: after 4,096 tokens, a token of SmolLM2 in speculative mode took 67 ms with it, 58 without.
NOT_SHARED = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
# Loops over stored numbers with their signatures, by module, that do not take bfloat16 yet.
_in_float32_only: dict[str, list[tuple[Any, str]]] = {}
_compiling = threading.Lock()


def compiled(*signatures: str, fastmath: bool | set[str] = False, parallel: bool = False) -> Callable[[Loop], Loop]:
    """Compile a loop for each of ``signatures``, and cache it on disk for all processes if there is space.

    ``number`` in a signature is the dtype of K and V: float32, and bfloat16 after ``compile_for_bfloat16``.
    """
    shared = dict.fromkeys(NOT_SHARED, False) if parallel else False
    options = {"nogil": True, "fastmath": fastmath, "parallel": shared}
    exact = [signature.replace("number", FLOAT32) for signature in signatures]

    def compile_loop(loop: Loop) -> Loop:
        try:
            compiled: Loop = numba.njit(exact, cache=True, **options)(loop)
        except (OSError, RuntimeError):  # the disk is full, or no folder is writable
            compiled = numba.njit(exact, **options)(loop)
        stored = [(compiled, one) for one in signatures if "number" in one]
        if stored:
            _in_float32_only.setdefault(loop.__module__, []).extend(stored)
        return compiled

    return compile_loop


def compile_for_bfloat16(module: str) -> None:
    """Compile the loops of an imported module for bfloat16 too, which takes as long again unless they are cached."""
    if module not in _in_float32_only:
        return
    with _compiling:  # a thread that loads what other processes compiled calls this too
        for loop, signature in _in_float32_only.get(module, ()):
            loop.disable_compile(False)
            with suppress(OSError):  # the disk is full: compiled, but not cached
                loop.compile(signature.replace("number", BFLOAT16))
            loop.disable_compile()
        _in_float32_only.pop(module, None)


@intrinsic  # type: ignore[untyped-decorator]
def widened(_context: Any, number: Any) -> Any:
    """Convert a stored number to float32: bfloat16 is its upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if number != types.uint16:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return types.float32(number), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of ``array[index]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        build_prefetch(builder, builder.gep(data, [arguments[1]]), SECOND_CACHE)
        return context.get_dummy_value()

    return types.void(array, index), generate


def build_prefetch(builder: Any, pointer: Any, cache: int) -> None:
    """Prefetch the cache line at ``pointer``, from generated code."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    shape = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    intrinsic = builder.module.declare_intrinsic("llvm.prefetch", [address.type], shape)
    builder.call(intrinsic, [address, number(FOR_READING), number(cache), number(DATA)])


# Inlined, because a call would take as long as prefetching saves.
@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def prefetch(rows: Array, start: int, width: int) -> None:
    """Prefetch ``width`` numbers from ``rows[start]`` on, which may be beyond its end, without waiting."""
    for at in range(start, start + width, LINE // rows.itemsize):
        _prefetch(rows, at)


@intrinsic  # type: ignore[untyped-decorator]
def add_atomically(_context: Any, array: Any, index: Any, number: Any) -> Any:
    """Add the integer ``number`` to ``array[index]``, which threads share; return the previous value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), arguments[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


def use_threads(threads: int) -> None:
    """Set the number of threads of this thread's parallel loops, at most numba's own."""
    if HAS_THREADS:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


# Start numba's threads, one per processor. OpenMP would change torch's number of threads, so restore it.
_torch_threads = torch.get_num_threads()
use_threads(1)
torch.set_num_threads(_torch_threads)


@numba.njit(fastmath={"contract"})  # type: ignore[untyped-decorator]  # no more, or the parts of ln 2 would be merged
def exp(x: Any) -> Any:
    """Return e ** ``x`` for ``x <= 0`` in float32, accurate to the last place; at least the smallest normal number.

    The C library computes one number at a time, which made up half the cost of choosing pages. Method of Cody and
    Waite: a power of two, which is a bfloat16, times a polynomial of the rest (with the coefficients of Cephes' expf).
    """
    x = max(x, LEAST_EXPONENT)
    twos = np.floor(x / LN_2 + np.float32(0.5))
    x = x - twos * LN_2_HIGH - twos * LN_2_LOW
    series = SERIES[0]
    for coefficient in SERIES[1:]:
        series = series * x + coefficient
    return (series * x * x + x + np.float32(1)) * widened(np.uint16((np.int32(twos) + 127) << 7))
