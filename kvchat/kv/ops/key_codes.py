"""An index for choosing single tokens: keys quantized to a few bits (torch reference).

Each page, KV head and channel stores its lowest and highest key in 16 bits. Each token stores, per channel, the nearest
of ``2 ** bits`` levels between them: code = round((k - low) / (high - low) * (2 ** bits - 1)). Scales are per channel
because keys have outlier channels (KIVI, arXiv 2402.02750). With two bits, the index takes 3 bits per key element with
the scales, 9.4 % of the K/V in 16 bits.

A page is a row of int32 words: first the codes ``[width / per, page]``, where a word has ``per = 32 / bits`` channels
of one token; then the lowest and highest keys ``[2, width]``, in the model's dtype, or in bfloat16 for a float32 model.
``width`` is d_k rounded up to whole words.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 32  # bits


@cache
def width_of(d_k: int, bits: int) -> int:
    """Return the channels per row of a page: d_k rounded up to whole words."""
    per = WORD // bits
    return -(-d_k // per) * per


def words_of(d_k: int, page: int, bits: int) -> int:
    width = width_of(d_k, bits)
    return width * bits // WORD * page + width


def edge_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that stores the lowest and highest of keys in ``dtype``."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def encode(keys: Tensor, page: int, bits: int) -> Tensor:
    """Encode ``keys [H, n, d_k]`` as pages, int32 ``[H, pages, words]``. The last page may be partly filled."""
    heads, n, d_k = keys.shape
    pages, per, width = -(-n // page), WORD // bits, width_of(d_k, bits)
    tiles = pad(keys, (0, width - d_k, 0, pages * page - n)).view(heads, pages, page, width)
    if n % page:  # padding must not affect the bounds of the last page
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
    """Return the lowest and the highest keys in ``index [H, pages, words]``: float32 ``[H, pages, width]`` each."""
    width = width_of(d_k, bits)
    kept = index[..., width * bits // WORD * page :].contiguous().view(edge_dtype(dtype)).float()
    return kept[..., :width], kept[..., width:]


def decode(index: Tensor, d_k: int, page: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Decode the pages ``index [H, pages, words]`` to keys, float32 ``[H, pages * page, d_k]``."""
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
    """Score the tokens in ``index [H, pages, words]`` for ``query [H_q, d_k]``: logits, float32 ``[H, G, tokens]``."""
    grouped = query.float().view(index.shape[0], -1, query.shape[-1]) * scaling
    keys = decode(index, query.shape[-1], page, bits, query.dtype)
    return torch.bmm(grouped, keys.transpose(1, 2))


def excess(query: Tensor, index: Tensor, page: int, bits: int, scaling: float) -> Tensor:
    """Return by how much ``token_scores`` overestimates the log of each page's mass: float32 ``[H, G, pages]``.

    Each code has a random error of up to half a step. For a sum of errors with variance v, the mean of its exponential
    is too high by a factor of e ** (v / 2). Here v = sum over channels of (scaling * q * step) ** 2 / 12.
    """
    low, high = edges(index, query.shape[-1], page, bits, query.dtype)
    steps = ((high - low) / ((1 << bits) - 1))[..., : query.shape[-1]]
    grouped = query.float().view(len(index), -1, query.shape[-1]) * scaling
    return torch.bmm(grouped**2, steps.transpose(1, 2) ** 2) / 24
