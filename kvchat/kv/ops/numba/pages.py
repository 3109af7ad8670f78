"""Choosing, moving and opening a layer's pages, and rotary embedding of one token, compiled by numba.

These are some forty operations on a few hundred numbers. In torch and numpy the cost is that of the calls.
"""

from __future__ import annotations

import numba
import numpy as np

from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops.numba.loops import Array, compiled
from kvchat.kv.ops.numba.parts import add_softmax, score_pages, turn


@compiled("i8(i4[:, ::1], i4[:, ::1], i8, f4[:, ::1])")
def open_slots(table: Array, attended: Array, first: int, bias: Array) -> int:
    """Compute ``DeviceSlots.bias`` of ``table [H, n]`` from token ``first`` on; return how many entries are read."""
    heads, n = table.shape
    read = 0
    for head in range(heads):
        for slot in range(n):
            attended[head, slot] = table[head, slot]
            opened = table[head, slot] >= first
            read += opened
            bias[head, slot] = 0 if opened else -np.inf
    return read


@compiled("void(f4[:, :, ::1], number[:, :, ::1], f4, f4[:, :, ::1])")
def page_scores(query: Array, bounds: Array, scaling: float, scores: Array) -> None:
    """Compute ``selection.page_scores`` into ``scores [H, G, page]``.

    ``query`` is ``[H, G, d_k]``, ``bounds`` is ``[H, page, 2 * d_k]``.
    """
    for head in range(len(query)):
        score_pages(query[head], bounds[head], scaling, scores[head])


@numba.njit  # type: ignore[untyped-decorator]
def find_best(weights: Array, first: int, wanted: Array, best: Array) -> None:
    """Write the highest ``weights`` to ``best``, and their indices plus ``first`` to ``wanted``, padded with EMPTY."""
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
    """Compute ``selection.assign_slots`` of one head; overwrites ``wanted``."""
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
    """Compute ``TorchOps.choose`` among the pages ``first`` to ``last`` (at least one) into ``placed [H, k]``."""
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
    """Compute ``DeviceSlots.open_pages`` of ``pages [layers, H, k]`` in ``table [layers, H, n]``."""
    layers, heads, k = pages.shape
    for layer in range(layers):
        for head in range(heads):
            for slot in range(k):
                start = pages[layer, head, slot] * page_size  # below ``first`` if the slot is empty
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

    Copies from ``source [block, word]``, with strides in blocks, to ``target [2, H, slot, word]``; a word has 8 bytes.
    Adds the K/V pairs moved and wanted to ``counters [2]``.
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

    Values follow ``value_rows`` and ``value_to`` rows later.
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
    """Apply rotary embedding to the ``heads [n, d]`` of one token, with ``cos`` and ``sin [d]``."""
    turn(heads, cos, sin)
