"""The two products of one token's attention on a CPU, wherever K and V lie in the host pool.

Over many tokens, over scattered ones and over 8-bit pages they are loops that numba compiles; over few tokens, in half
precision or without numba they are torch's. Tensors are shared with numpy, not copied.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvchat.kv.attention import Products, products
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import rounding

MANY = 2048  # tokens from which on loops are faster on two threads; fewer never ask for numba
NUMBER = 4  # bytes of float32

Arguments = tuple[Any, ...]


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
    if keys.shape[1] < MANY or keys.dtype != torch.float32 or not _threaded():  # numpy knows no bfloat16
        return products(keys, values)
    from kvchat.kv.ops import compiled_in_a_row as loops

    return _compiled(loops, keys.shape[1], values.shape[2], _rows(keys), _rows(values))


# ---- over scattered tokens


def scattered(keys: Tensor, values: Tensor, table: Tensor, first: int) -> Products | None:
    """Over those of ``keys [H, n, d_k]`` and ``values [H, n, d_v]`` that ``table [m]`` names, from ``first`` on.

    None where there is no loop for it.
    """
    if keys.dtype != torch.float32 or not _threaded():
        return None
    from kvchat.kv.ops import compiled_scattered as loops

    named = table.numpy(), first
    return _compiled(loops, len(table), values.shape[2], (*_rows(keys), *named), (*_rows(values), *named))


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

    blocks = pages.rounded.view(-1)
    codes = blocks.view(torch.int8).numpy(), blocks.view(torch.float32).numpy(), rounding.block_bytes(g), g.page
    named = pages.table.numpy(), pages.first, pages.places.numpy()
    keys, values = ((*named, *_rows(exact), *codes) for exact in pages.exact)
    return _compiled(loops, len(pages.table), g.d_v, keys, values)


# ---- inside


def _threaded() -> bool:
    """True if there are compiled loops; they know then how many threads to run on."""
    if not (loops := compiled_loops()):
        return False
    loops.use_threads(torch.get_num_threads())
    return True


def _compiled(loops: ModuleType, tokens: int, d_v: int, keys: Arguments, values: Arguments) -> Products:
    """Those of the module over ``tokens`` tokens; ``keys`` and ``values`` are what its loops read, as they take it."""

    def scores(query: Tensor) -> Tensor:
        made = torch.empty((*query.shape[:2], tokens))
        loops.scores(query.contiguous().numpy(), *keys, made.numpy())
        return made

    def sums(weights: Tensor) -> Tensor:
        heads, group, _ = weights.shape
        made = torch.empty((heads, -(-tokens // loops.TOKENS), group, d_v))
        loops.sums(weights.contiguous().numpy(), *values, made.numpy())
        return made.sum(1)

    return Products(scores, sums)


def _rows(rows: Tensor) -> Arguments:
    """The numbers from the first to the last of ``rows [H, n, d]``, one behind the other, and the strides in them."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return rows.as_strided((last + 1,), (1,)).numpy(), *rows.stride()[:2]
