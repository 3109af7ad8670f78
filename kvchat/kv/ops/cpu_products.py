"""The two products of one token's attention on a CPU, wherever K and V lie in the host pool.

Over many tokens, over scattered ones and over 8-bit pages they are loops that numba compiles; over few tokens, in half
precision or without numba they are torch's. Tensors are shared with numpy, not copied.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvchat.kv.attention import Products, products
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import rounding

MANY = 2048  # tokens from which on loops are faster on two threads; fewer never ask for numba
NUMBER = 4  # bytes of float32

Memory = np.ndarray[Any, Any]


@cache
def compiled_loops() -> ModuleType | None:
    """The compiled loops; None where numba does not run. Asked for only where they are used: it takes 0.5 s."""
    try:
        from kvchat.kv.ops import compiled
    except (ImportError, OSError, MemoryError):  # numpy or Python is unknown to numba; no memory for its library
        return None
    return compiled


# ---- over tokens in a row


def in_a_row(keys: Tensor, values: Tensor) -> Products:
    """Over ``keys [H, n, d_k]`` and ``values [H, n, d_v]``."""
    if keys.shape[1] < MANY or keys.dtype != torch.float32 or not (loops := _threaded()):  # numpy knows no bfloat16
        return products(keys, values)
    return Products(partial(_scores, loops, keys), partial(_sums, loops, values))


def _scores(loops: ModuleType, keys: Tensor, query: Tensor) -> Tensor:
    scores = torch.empty((*query.shape[:2], keys.shape[1]))
    loops.attention_scores(query.contiguous().numpy(), _memory(keys), *keys.stride()[:2], scores.numpy())
    return scores


def _sums(loops: ModuleType, values: Tensor, weights: Tensor) -> Tensor:
    heads, group, n = weights.shape
    sums = torch.empty((heads, -(-n // loops.TOKENS), group, values.shape[2]))
    loops.attention_sums(weights.numpy(), _memory(values), *values.stride()[:2], sums.numpy())
    return sums.sum(1)


# ---- over scattered tokens


def scattered(keys: Tensor, values: Tensor, table: Tensor, first: int) -> Products | None:
    """Over those of ``keys [H, n, d_k]`` and ``values [H, n, d_v]`` that ``table [m]`` names, from ``first`` on.

    None where there is no loop for it.
    """
    if keys.dtype != torch.float32 or not _threaded():
        return None
    from kvchat.kv.ops import compiled_scattered as loops

    rows = table.numpy(), first
    return Products(partial(_scattered_scores, loops, keys, *rows), partial(_scattered_sums, loops, values, *rows))


def _scattered_scores(loops: ModuleType, keys: Tensor, table: Memory, first: int, query: Tensor) -> Tensor:
    scores = torch.empty((*query.shape[:2], len(table)))
    loops.scores(query.contiguous().numpy(), _memory(keys), *keys.stride()[:2], table, first, scores.numpy())
    return scores


def _scattered_sums(loops: ModuleType, values: Tensor, table: Memory, first: int, weights: Tensor) -> Tensor:
    heads, group, n = weights.shape
    sums = torch.empty((heads, -(-n // loops.TOKENS), group, values.shape[2]))
    loops.sums(weights.numpy(), _memory(values), *values.stride()[:2], table, first, sums.numpy())
    return sums.sum(1)


# ---- over pages of which some are kept in 8 bits


class MixedPages(NamedTuple):
    """A layer's pages: ``exact [2, H, token, d]`` and ``rounded [page, H, block_bytes]``; ``places [page]`` says which.

    Of the tokens in ``table [n]``, ascending, those from ``first`` on are read.
    """

    exact: Tensor
    rounded: Tensor
    places: Tensor
    table: Tensor
    first: int


def mixed(pages: MixedPages, g: Geometry) -> Products | None:
    """Over the tokens of ``pages``; None where there is no loop for it."""
    whole = 2 * g.page * g.d % NUMBER == rounding.block_bytes(g) % NUMBER == 0
    if not whole or g.dtype != torch.float32 or not _threaded():
        return None
    from kvchat.kv.ops import compiled_eight_bit as loops

    return Products(partial(_mixed_scores, loops, pages, g), partial(_mixed_sums, loops, pages, g))


def _mixed_scores(loops: ModuleType, pages: MixedPages, g: Geometry, query: Tensor) -> Tensor:
    scores = torch.empty((*query.shape[:2], len(pages.table)))
    loops.scores(query.contiguous().numpy(), *_mixed(pages, 0, g), scores.numpy())
    return scores


def _mixed_sums(loops: ModuleType, pages: MixedPages, g: Geometry, weights: Tensor) -> Tensor:
    heads, group, n = weights.shape
    sums = torch.empty((heads, -(-n // loops.TOKENS), group, g.d_v))
    loops.sums(weights.numpy(), *_mixed(pages, 1, g), sums.numpy())
    return sums.sum(1)


def _mixed(pages: MixedPages, kind: int, g: Geometry) -> tuple[Any, ...]:
    rows, blocks = pages.exact[kind], pages.rounded.view(-1)
    exact = _memory(rows), *rows.stride()[:2]
    codes = blocks.view(torch.int8).numpy(), blocks.view(torch.float32).numpy(), rounding.block_bytes(g), g.page
    return pages.table.numpy(), pages.first, pages.places.numpy(), *exact, *codes


# ---- inside


def _threaded() -> ModuleType | None:
    """The compiled loops, told how many threads to run on."""
    if loops := compiled_loops():
        loops.use_threads(torch.get_num_threads())
    return loops


def _memory(rows: Tensor) -> Memory:
    """The numbers from the first to the last of ``rows [H, n, d]``, one behind the other."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return rows.as_strided((last + 1,), (1,)).numpy()
