"""The share of a step's attention that falls on the tokens it read: looked at between two steps, from the stored keys.

Beside it what the best choice of as many tokens would cover, one by one or in pages: what a better index could gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.inspect import attended
from kvchat.kv.state import KVState

CHUNK = 128  # pages whose keys are looked at together: they bound what it takes on the device


def weights(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """The weights that attention over everything stored gives for the last token's query, float32 ``[H, G, total]``.

    Of KV ``heads`` and each query head of theirs, whatever the mode reads; 0 beyond the layer's window. With learned
    sinks a row sums to less than 1.
    """
    g, spec, p = state.geometry, state.specs[layer], state.geometry.page
    query = state.query[layer].float().view(g.kv_heads, g.group, g.d_k)[heads] * state.scaling(layer)
    first = max(0, state.total - spec.window) if spec is not None and spec.window is not None else 0
    parts = [query.new_full((*query.shape[:2], first // p * p), -torch.inf)]
    for page in range(first // p, g.pages(state.total), CHUNK):
        keys, _ = state.host.dense(layer, min(state.total, (page + CHUNK) * p), page)
        parts.append(query @ keys[heads].float().transpose(1, 2))
    scores = torch.cat(parts, -1)
    if spec is not None and spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores[..., :first] = -torch.inf
    if spec is None or spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks.float().view(g.kv_heads, g.group, 1)[heads]
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def covered(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """The share of a KV head's attention to stored tokens that falls on those the last step read, float32 ``[H]``.

    The mean over its query heads; 1 where everything is read that the layer may see.
    """
    shares = of_tokens(state, layer, heads)
    return (shares * attended(state, layer)[heads]).sum(-1)


def of_tokens(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """Each stored token's share of a KV head's attention to all of them, ``[H, total]``: sums to 1."""
    shares = weights(state, layer, heads).mean(1)
    return shares / shares.sum(-1, keepdim=True)


def of_best_tokens(shares: Tensor, read: Tensor) -> Tensor:
    """What the ``read [H]`` tokens with the largest of ``shares [H, total]`` cover, ``[H]``."""
    return _of_largest(shares, read)


def of_best_pages(shares: Tensor, read: Tensor, page: int) -> Tensor:
    """What the pages of ``page`` tokens with the largest shares cover that hold ``read [H]`` tokens at most, ``[H]``.

    All where as many tokens are read as have a share.
    """
    missing = -shares.shape[1] % page
    whole = torch.nn.functional.pad(shares, (0, missing)).view(len(shares), -1, page).sum(-1)
    everything = read >= (shares > 0).sum(-1)
    return torch.where(everything, 1.0, _of_largest(whole, torch.div(read, page, rounding_mode="floor")))


def _of_largest(shares: Tensor, number: Tensor) -> Tensor:
    summed = torch.nn.functional.pad(shares.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    return summed.gather(-1, number.clamp(max=shares.shape[1]).unsqueeze(-1)).squeeze(-1).clamp(max=1.0)
