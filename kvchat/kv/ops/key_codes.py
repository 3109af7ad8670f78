"""Keys in a few bits: an index by which tokens are chosen one by one (torch reference).

Of each page, KV head and channel the lowest and the highest key are kept in 16 bits, and of each token and channel the
nearest of ``2 ** bits`` steps between them: code = round((k - low) / (high - low) * (2 ** bits - 1)). Scales by channel
suit keys, whose outliers lie in channels (KIVI, arXiv 2402.02750). Two bits take 3 bits a key element, 9.4 % of the K/V
in 16 bits.

A page is a row of int32 words: the codes ``[width / per, page]``, a word with those of ``per = 32 / bits`` channels of
one token, then the lowest and the highest keys ``[2, width]``, in the model's dtype or, of float32, in bfloat16.
``width`` is d_k in whole words.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 32  # bits


@cache
def width_of(d_k: int, bits: int) -> int:
    """Channels of a page's rows: d_k, and what fills up a word."""
    per = WORD // bits
    return -(-d_k // per) * per


def words_of(d_k: int, page: int, bits: int) -> int:
    width = width_of(d_k, bits)
    return width * bits // WORD * page + width


def edge_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the lowest and highest of keys in ``dtype`` are kept in."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def encode(keys: Tensor, page: int, bits: int) -> Tensor:
    """The pages of ``keys [H, n, d_k]``, of which the last may be partly filled: int32 ``[H, pages, words]``."""
    heads, n, d_k = keys.shape
    pages, per, width = -(-n // page), WORD // bits, width_of(d_k, bits)
    tiles = pad(keys, (0, width - d_k, 0, pages * page - n)).view(heads, pages, page, width)
    if n % page:  # what is not there has no code and bounds nothing
        tiles = tiles.clone()
        tiles[:, -1, n % page :] = tiles[:, -1, :1]
    low, high = (edge.to(edge_dtype(keys.dtype)) for edge in tiles.aminmax(dim=2))
    scale = (high.float() - low.float()).unsqueeze(2)
    share = (tiles.float() - low.float().unsqueeze(2)) / scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = (share.clamp(0, 1) * ((1 << bits) - 1)).round().to(torch.int64)  # an edge may be rounded inwards
    shifts = torch.arange(0, WORD, bits, device=keys.device)
    words = (codes.view(heads, pages, page, width // per, per) << shifts).sum(-1)
    # int64 to int32 keeps the lower half of the bits.
    packed = words.transpose(2, 3).reshape(heads, pages, -1).to(torch.int32)
    return torch.cat((packed, torch.cat((low, high), -1).view(torch.int32)), -1)


def edges(index: Tensor, d_k: int, page: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The lowest and the highest keys in the pages ``index [H, pages, words]``: float32 ``[H, pages, width]`` each."""
    width = width_of(d_k, bits)
    kept = index[..., width * bits // WORD * page :].contiguous().view(edge_dtype(dtype)).float()
    return kept[..., :width], kept[..., width:]


def decode(index: Tensor, d_k: int, page: int, bits: int, dtype: torch.dtype) -> Tensor:
    """What the pages ``index [H, pages, words]`` keep of their keys: float32 ``[H, pages * page, d_k]``."""
    heads, pages, _ = index.shape
    per, width = WORD // bits, width_of(d_k, bits)
    edge = width // per * page
    low, high = (each.unsqueeze(2) for each in edges(index, d_k, page, bits, dtype))
    shifts = torch.arange(0, WORD, bits, device=index.device)
    packed = index[..., :edge].view(heads, pages, width // per, 1, page)
    codes = (packed >> shifts.to(torch.int32)[:, None]) & ((1 << bits) - 1)
    codes = codes.reshape(heads, pages, width, page).transpose(2, 3)
    keys = low + codes.float() * ((high - low) / ((1 << bits) - 1))
    return keys.reshape(heads, pages * page, width)[..., :d_k]


def token_scores(query: Tensor, index: Tensor, page: int, bits: int, scaling: float) -> Tensor:
    """Logits of all tokens in the ``index [H, pages, words]`` for ``query [H_q, d_k]``: float32 ``[H, G, tokens]``."""
    grouped = query.float().view(index.shape[0], -1, query.shape[-1]) * scaling
    keys = decode(index, query.shape[-1], page, bits, query.dtype)
    return torch.bmm(grouped, keys.transpose(1, 2))


def excess(query: Tensor, index: Tensor, page: int, bits: int, scaling: float) -> Tensor:
    """How much too high the logarithms of the pages' masses are by ``token_scores``: float32 ``[H, G, pages]``.

    A code is off by up to half a step, at random; the mean of e to the power of a sum with variance v is e to the power
    of v / 2 times too high. v = sum over channels of (scaling * q * step) ** 2 / 12.
    """
    low, high = edges(index, query.shape[-1], page, bits, query.dtype)
    steps = ((high - low) / ((1 << bits) - 1))[..., : query.shape[-1]]
    grouped = query.float().view(len(index), -1, query.shape[-1]) * scaling
    return torch.bmm(grouped**2, steps.transpose(1, 2) ** 2) / 24
