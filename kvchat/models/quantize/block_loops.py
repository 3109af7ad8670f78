"""Loops over blocks of weights, compiled by numba: ggml's blocks to float32, and groups of 32 to 4-bit levels.

For the same bits, numpy and torch need a pass over memory for each step and ten times as long. Block scales are passed
as float32, because numba cannot read float16.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch

from kvchat.kv.ops.numba.loops import compiled

FEWEST = 4096  # fewest blocks that are worth a thread
Array = np.ndarray[Any, Any]
NO_NAN = {"nnan", "nsz"}  # lets LLVM vectorize comparisons; arithmetic stays exact


@compiled("void(u1[:, ::1], f4[::1], f4[::1], i8, f4, f4[:, ::1])")
def four_bits(blocks: Array, scale: Array, least: Array, at: int, middle: np.float32, out: Array) -> None:
    """Unpack Q4_0 (``least`` is zeros) and Q4_1: levels from byte ``at`` on, where ``middle`` is the level of zero."""
    for block in range(len(blocks)):
        d, m = scale[block], least[block]
        for i in range(16):
            byte = np.int64(blocks[block, at + i])
            out[block, i] = d * (np.float32(byte & 15) - middle) + m
            out[block, i + 16] = d * (np.float32(byte >> 4) - middle) + m


@compiled("void(u1[:, ::1], f4[::1], f4[::1], i8, f4, f4[:, ::1])")
def five_bits(blocks: Array, scale: Array, least: Array, at: int, middle: np.float32, out: Array) -> None:
    """Unpack Q5_0 and Q5_1: four bytes of high bits from ``at`` on, then the levels' low bits."""
    for block in range(len(blocks)):
        d, m = scale[block], least[block]
        for i in range(16):
            byte = np.int64(blocks[block, at + 4 + i])
            low = (byte & 15) | (((np.int64(blocks[block, at + (i >> 3)]) >> (i & 7)) & 1) << 4)
            high = (byte >> 4) | (((np.int64(blocks[block, at + 2 + (i >> 3)]) >> (i & 7)) & 1) << 4)
            out[block, i] = d * (np.float32(low) - middle) + m
            out[block, i + 16] = d * (np.float32(high) - middle) + m


@compiled("void(u1[:, ::1], f4[::1], f4[::1], i8, f4[:, ::1])")
def of_table(blocks: Array, scale: Array, table: Array, at: int, out: Array) -> None:
    """Unpack MXFP4 and IQ4_NL: indices into a ``table`` of 16 levels, from byte ``at`` on."""
    for block in range(len(blocks)):
        d = scale[block]
        for i in range(16):
            byte = np.int64(blocks[block, at + i])
            out[block, i] = d * table[byte & 15]
            out[block, i + 16] = d * table[byte >> 4]


@compiled("void(u1[:, ::1], f4[::1], f4[:, ::1])")
def eight_bits(blocks: Array, scale: Array, out: Array) -> None:
    """Unpack Q8_0."""
    for block in range(len(blocks)):
        d = scale[block]
        for i in range(32):
            out[block, i] = np.float32(np.int8(blocks[block, 2 + i])) * d


@compiled("void(u1[:, ::1], f4[::1], f4[::1], b1, f4[:, ::1])")
def four_or_five_k(blocks: Array, scale: Array, least: Array, five: bool, out: Array) -> None:
    """Unpack Q4_K or, with ``five``, Q5_K: eight groups of 32, each with a 6-bit scale and minimum."""
    levels = 48 if five else 16
    for block in range(len(blocks)):
        for group in range(8):
            if group < 4:
                s, m = np.int64(blocks[block, 4 + group]) & 63, np.int64(blocks[block, 8 + group]) & 63
            else:
                last = np.int64(blocks[block, 8 + group])
                s = (last & 15) | ((np.int64(blocks[block, group]) >> 6) << 4)
                m = (last >> 4) | ((np.int64(blocks[block, 4 + group]) >> 6) << 4)
            d, low = scale[block] * np.float32(s), least[block] * np.float32(m)
            for i in range(32):
                byte = np.int64(blocks[block, levels + 32 * (group >> 1) + i])
                level = byte >> 4 if group & 1 else byte & 15
                if five:
                    level |= ((np.int64(blocks[block, 16 + i]) >> group) & 1) << 4
                out[block, 32 * group + i] = d * np.float32(level) - low


@compiled("void(u1[:, ::1], f4[::1], f4[:, ::1])")
def six_k(blocks: Array, scale: Array, out: Array) -> None:
    """Unpack Q6_K: sixteen groups of 16 with an 8-bit scale; levels as four low bits and two high ones."""
    for block in range(len(blocks)):
        for half in range(2):
            for part in range(4):
                shift = 2 * part
                for i in range(32):
                    byte = np.int64(blocks[block, 64 * half + 32 * (part & 1) + i])
                    low = byte >> 4 if part > 1 else byte & 15
                    high = (np.int64(blocks[block, 128 + 32 * half + i]) >> shift) & 3
                    at = 128 * half + 32 * part + i
                    d = scale[block] * np.float32(np.int8(blocks[block, 192 + (at >> 4)]))
                    out[block, at] = d * (np.float32(low | (high << 4)) - np.float32(32))


def in_threads(count: int, loop: Callable[[slice], None]) -> None:
    """Divide ``count`` blocks into parts and call ``loop`` for each, on as many threads as torch uses now."""
    threads = min(torch.get_num_threads(), -(-count // FEWEST))
    ends = [count * part // threads for part in range(threads + 1)] if threads > 1 else [0, count]
    parts = [slice(*pair) for pair in pairwise(ends)]
    if len(parts) == 1:
        loop(parts[0])
        return
    for _ in _pool().map(loop, parts):
        pass


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="blocks")


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _worst(groups: Array, group: int, least: np.float32, span: np.float32, count: int) -> np.float32:
    """Return the largest distance of a value of the group from the nearest of ``count`` steps, in steps."""
    worst = np.float32(0)
    for i in range(32):
        level = (groups[group, i] - least) / span * np.float32(count)
        far = abs(level - np.rint(level))
        worst = far if far > worst else worst
    return worst


@compiled("void(f4[:, ::1], i8, i8, f4, f4[::1], f4[::1])", fastmath=NO_NAN)
def ranges(groups: Array, most: int, fewest: int, near: np.float32, low: Array, step: Array) -> None:
    """Find the minimum ``low [n]`` of each of the ``groups [n, 32]``, and the ``step [n]`` between levels.

    A group's span is divided into the largest number of steps, from ``most`` down to ``fewest``, such that every value
    is ``near`` a level; if there is none, into ``most``.
    """
    for group in range(len(groups)):
        least = greatest = groups[group, 0]
        for i in range(32):
            value = groups[group, i]
            least = value if value < least else least
            greatest = value if value > greatest else greatest
        span, steps = greatest - least, most
        if span > 0:
            for count in range(most, fewest - 1, -1):
                if _worst(groups, group, least, span, count) < near:
                    steps = count
                    break
        low[group], step[group] = least, span / np.float32(steps)


@compiled("void(f4[:, ::1], f4[::1], f4[::1], f4, f4, i4[:, ::1])")
def levels(groups: Array, scale: Array, zero: Array, middle: np.float32, most: np.float32, out: Array) -> None:
    """Write the level of each value, from 0 to ``most``, to ``out``; ``zero`` is the value of level ``middle``."""
    for group in range(len(groups)):
        d, z = scale[group], zero[group]
        for i in range(32):
            level = np.rint((groups[group, i] - z) / d + middle)
            out[group, i] = np.int32(min(max(level, np.float32(0)), most))
