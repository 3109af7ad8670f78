"""The two products of one token's attention on a CPU, wherever K and V lie in the host pool.

They are loops that numba compiles. Over few tokens in float32, in float16 or without numba they are torch's, which
needs 3 to 10 times as long for bfloat16. Tensors are shared with numpy, not copied.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvchat.kv.attention import Products, products
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import PAGE, Geometry
from kvchat.kv.memory import rounding

MANY = 2048  # tokens in float32 from which on loops are faster on two threads; fewer never ask for numba
KNOWN = (torch.float32, torch.bfloat16)  # to the loops

NO_SINKS = np.empty((0, 0), np.float32)

Arguments = tuple[Any, ...]
Numbers = np.ndarray[Any, Any]


@cache
def compiled_loops() -> ModuleType | None:
    """The compiled loops; None where numba does not run. Asked for only where they are used: it takes 0.5 s."""
    try:
        from kvchat.kv.ops import compiled
    except (ImportError, OSError, MemoryError):  # numpy or Python is unknown to numba; no memory for its library
        return None
    return compiled


def use_threads(threads: int) -> None:
    """Let the compiled loops that this thread asks for run on so many threads."""
    if loops := compiled_loops():
        loops.use_threads(threads)


def loops_over(dtype: torch.dtype) -> ModuleType | None:
    """``compiled_loops``, which then take stored numbers of ``dtype``; None where there are none for it."""
    loops = compiled_loops() if dtype in KNOWN else None
    if loops and dtype == torch.bfloat16:
        loops.compile_for_bfloat16()
    return loops


def numbers(stored: Tensor) -> Numbers:
    """``stored`` as numpy sees it: of bfloat16, which it does not know, the bits."""
    return (stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored).numpy()


# ---- over tokens in a row


def in_a_row(keys: Tensor, values: Tensor) -> Products:
    """Over ``keys [H, n, d_k]`` and ``values [H, n, d_v]``."""
    few = keys.dtype == torch.float32 and keys.shape[1] < MANY
    if few or not _threaded(keys.dtype):
        return products(keys, values)
    from kvchat.kv.ops import compiled_in_a_row as loops

    return _compiled(loops, keys.shape[1], values, _rows(keys), _rows(values))


# ---- over scattered tokens


def scattered(keys: Tensor, values: Tensor, table: Tensor, first: int) -> Products | None:
    """Over the tokens in ``table [H or 1, m]`` from ``first`` on, of ``keys [H, n, d_k]`` and ``values [H, n, d_v]``.

    None where there is no loop for it.
    """
    if not _threaded(keys.dtype):
        return None
    from kvchat.kv.ops import compiled_scattered as loops

    named = table.numpy(), first
    return _compiled(loops, table.shape[1], values, (*_rows(keys), *named), (*_rows(values), *named))


# ---- over pages of which some are kept in 8 bits


class MixedPages(NamedTuple):
    """A layer's pages: ``exact [2, H, token, d]`` and ``rounded [page, H, block_bytes]``; ``places [page]`` says which.

    Of the tokens in ``table [H or 1, n]``, ascending, those from ``first`` on are read.
    """

    exact: Tensor
    rounded: Tensor
    places: Tensor
    table: Tensor
    first: int


def mixed(pages: MixedPages, g: Geometry) -> Products | None:
    """Over the tokens of ``pages``; None where there is no loop for it."""
    size = g.dtype.itemsize
    whole = 2 * g.page * g.d % size == rounding.block_bytes(g) % size == 0
    if not whole or not _threaded(g.dtype):
        return None
    from kvchat.kv.ops import compiled_eight_bit as loops

    blocks = pages.rounded.view(-1)
    codes = blocks.view(torch.int8).numpy(), numbers(blocks.view(g.dtype)), rounding.block_bytes(g), g.page
    named = pages.table.numpy(), pages.first, pages.places.numpy()
    keys, values = pages.exact[0, ..., : g.d_k], pages.exact[1, ..., : g.d_v]
    stored = ((*named, *_rows(rows), *codes) for rows in (keys, values))
    return _compiled(loops, pages.table.shape[1], values, *stored)


# ---- choosing tokens


def token_loops(g: Geometry) -> ModuleType | None:
    """The compiled loops that choose tokens; None where there are none for the geometry."""
    if g.page != PAGE or not _threaded(g.dtype):
        return None
    from kvchat.kv.ops import compiled_tokens

    loops_over(g.dtype)  # those of the module too, which was just imported
    return compiled_tokens


def attended(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor | None:
    """Attention ``[H, G, d_v]`` of ``query [H, G, d_k]`` over the tokens in ``table [H, n]``; None without a loop.

    They are among those of ``keys [H, token, d_k]`` and ``values [H, token, d_v]``.
    """
    if not _threaded(keys.dtype):
        return None
    from kvchat.kv.ops import compiled_tokens as loops

    loops_over(keys.dtype)  # those of the module too, which was just imported
    asked = query.contiguous().float().numpy(), spec.scaling
    made = torch.empty((*query.shape[:2], values.shape[-1]))
    logits = NO_SINKS if sinks is None else sinks.float().contiguous().numpy()
    loops.attend_tokens(*asked, *_rows(keys), *_rows(values), table.numpy(), spec.softcap or 0.0, logits, made.numpy())
    return made.to(query.dtype)


# ---- inside


def _threaded(dtype: torch.dtype) -> bool:
    """True if there are compiled loops over numbers of ``dtype``; they know then how many threads to run on."""
    if not (loops := loops_over(dtype)):
        return False
    loops.use_threads(torch.get_num_threads())
    return True


def _compiled(loops: ModuleType, tokens: int, stored: Tensor, keys: Arguments, values: Arguments) -> Products:
    """Those of the module over ``tokens`` tokens whose values are ``stored [..., d_v]``.

    ``keys`` and ``values`` are what its loops read, as they take it.
    """
    loops_over(stored.dtype)  # those of ``loops`` too, which was just imported

    def scores(query: Tensor) -> Tensor:
        made = torch.empty((*query.shape[:2], tokens))
        loops.scores(query.contiguous().float().numpy(), *keys, made.numpy())
        return made

    def sums(weights: Tensor) -> Tensor:
        heads, group, _ = weights.shape
        made = torch.empty((heads, -(-tokens // loops.TOKENS), group, stored.shape[-1]))
        loops.sums(weights.contiguous().numpy(), *values, made.numpy())
        return made.sum(1).to(stored.dtype)

    return Products(scores, sums)


def _rows(rows: Tensor) -> Arguments:
    """The numbers from the first to the last of ``rows [H, n, d]``, one behind the other, and the strides in them."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return numbers(rows.as_strided((last + 1,), (1,))), *rows.stride()[:2]
