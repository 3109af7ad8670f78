"""Choose pages or tokens for each KV head, with fixed shapes and nothing read back to the host (torch reference)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvchat.kv.memory.device_slots import EMPTY

NOTHING = -1e30  # the log of no mass; finite, because the difference of two infinities is NaN


@dataclass(frozen=True, eq=False)
class Candidates:
    """The pages ``first`` to ``last`` (0-d int64, inclusive); ``masked [page]`` is True for all other pages."""

    first: int
    last: Tensor
    masked: Tensor

    @classmethod
    def between(cls, first: int, last: Tensor, pages: int) -> Candidates:
        every = torch.arange(pages, device=last.device)
        return cls(first, last, (every < first) | (every > last))


class TokenQuery(NamedTuple):
    """A ``query [H_q, d_k]`` and the keys it is compared with, in ``bits`` bits: ``codes [H, page, words]``.

    ``scaling`` is the layer's; ``means [H, page, d_v]`` are the pages' mean values if unread tokens are joined.
    """

    query: Tensor
    codes: Tensor
    bits: int
    scaling: float
    means: Tensor | None = None


class Places(NamedTuple):
    """Positions: the new token reads all from ``seen`` up to ``end`` except the candidates, and some of these.

    The candidates are ``first`` to ``last`` (inclusive). The index covers the first ``known`` tokens, in full pages,
    including all candidates.
    """

    known: int
    seen: int
    first: int
    last: int
    end: int


def page_bounds(keys: Tensor, pages: int, page: int) -> Tensor:
    """Return the element-wise maximum and negated minimum of each page's keys.

    Args:
        keys: ``[H, n, d_k]``; the last page may be partly filled.
        pages: number of pages.
        page: tokens per page.

    Returns:
        ``[H, pages, 2 * d_k]``, ``[max | -min]``.
    """
    heads, n, d_k = keys.shape
    both = torch.cat((keys, -keys), -1)
    lowest = torch.finfo(keys.dtype).min
    padded = torch.nn.functional.pad(both, (0, 0, 0, pages * page - n), value=lowest)
    return padded.view(heads, pages, page, 2 * d_k).amax(2)


def page_scores(query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
    """Return an upper bound of each page's attention logit (Quest's bound, FreeKV section 3.2), times ``scaling``.

    Args:
        query: ``[H_q, d_k]``.
        bounds: ``[H, page, 2 * d_k]``, ``[max | -min]``.
        scaling: the layer's attention scale. Departure: the paper and its published accuracy program omit it.

    Returns:
        ``[H, G, page]``
    """
    parts = torch.cat((query, -query), -1).relu_().mul_(scaling)
    return torch.bmm(parts.view(bounds.shape[0], -1, bounds.shape[-1]), bounds.transpose(1, 2))


def needs_correction(query: Tensor, before: Tensor, kv_heads: int, tau: float) -> Tensor:
    """Return True for each KV head whose mean query cosine over the group is below ``tau`` (FreeKV section 3.3).

    Args:
        query: ``[H_q, d_k]``.
        before: the previous token's query, ``[H_q, d_k]``.
        kv_heads: H.
        tau: threshold.

    Returns:
        bool ``[H]``.
    """
    tiny = torch.finfo(torch.float32).tiny
    cosine = torch.cosine_similarity(query.float(), before.float(), -1, tiny)
    below: Tensor = cosine.view(kv_heads, -1).mean(1) < tau
    return below


def chosen_by(corrected: Tensor, query: Tensor, before: Tensor) -> Tensor:
    """Return the ``query [H_q, d_k]`` for KV heads that are ``corrected [H]``, the one ``before`` for all others."""
    by_head = len(corrected), -1, query.shape[-1]
    return torch.where(corrected[:, None, None], query.view(by_head), before.view(by_head)).view_as(query)


def heaviest(scores: Tensor, hidden: Tensor, masked: Tensor, k: int) -> Tensor:
    """Return the ``k`` tokens or pages of highest weight for each KV head: softmax in float32, averaged over the group.

    Args:
        scores: ``[H, G, n]``.
        hidden: entries that have no weight, bool ``[n]``.
        masked: entries that must not be chosen but count in the softmax, bool ``[n]``.
        k: number to choose.

    Returns:
        ``[H, k]`` int64, best first, padded with -1.
    """
    weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).mean(1)
    # -inf, because even a weight that underflowed to 0 must beat an entry that must not be chosen.
    return best(weights.masked_fill(masked | hidden, -torch.inf), k)


def unread_part(scores: Tensor, unread: Tensor, excess: Tensor, means: Tensor) -> Tensor:
    """Estimate the attention to unread tokens from the mean values of their pages.

    Args:
        scores: index logits ``[H, G, n]``, in whole pages.
        unread: unread tokens, bool ``[H, n]``.
        excess: by how much the log of each page's mass is too high, ``[H, G, page]``.
        means: mean value of each page, ``[H, page, d_v]``.

    Returns:
        float32 ``[H, G, d_v + 1]``, the log-sum-exp in the last column: ``NOTHING`` if every token is read.
    """
    shape = *scores.shape[:2], means.shape[1], -1
    masses = scores.float().masked_fill(~unread.unsqueeze(1), NOTHING).view(shape)
    logs = (masses.logsumexp(-1) - excess).clamp(min=NOTHING)
    total = logs.logsumexp(-1, keepdim=True)
    return torch.cat((torch.bmm((logs - total).exp(), means.float()), total), -1)


def best(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` highest ``scores [H, n]``, int64 ``[H, k]``; -1 replaces -inf and NaN."""
    values, chosen = scores.topk(min(k, scores.shape[-1]), -1)
    chosen = chosen.masked_fill(~(values > -torch.inf), EMPTY)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=EMPTY)


def mask_of(chosen: Tensor, n: int) -> Tensor:
    """Return a mask ``[H, n]`` of the indices ``chosen [H, k]``; -1 is ignored."""
    # -1 marks an extra column, which is cut off.
    marks = torch.zeros((len(chosen), n + 1), dtype=torch.bool, device=chosen.device)
    return marks.scatter(1, chosen.masked_fill(chosen < 0, n), True)[:, :n]


def top_pages(scores: Tensor, masked: Tensor, k: int) -> Tensor:
    """Return the ``heaviest`` ``k`` pages, with the softmax over those not ``masked`` only (FreeKV's MeanS)."""
    return heaviest(scores, masked, masked, k)


def assign_slots(wanted: Tensor, resident: Tensor, places: int, reuse: bool = False) -> Tensor:
    """Assign a slot to each wanted token or page: resident ones stay, the others take empty slots, best first.

    Slots whose content is no longer wanted become empty. They are refilled in the same call only with ``reuse``,
    because attention may still be reading them.

    Args:
        wanted: ``[C, k]`` distinct tokens or pages, best first, -1 = none.
        resident: ``[C, n]`` distinct content of each slot, -1 = empty.
        places: number of tokens or pages.
        reuse: nothing is reading the slots of unwanted content.

    Returns:
        ``[C, n]``, the new content of each slot, -1 = none. With too few empty slots, the last ones wanted get none.
    """
    rows, n = resident.shape
    slots = torch.arange(n, device=resident.device).expand(rows, n)
    # -1 writes to an extra column, which is then cleared.
    slot_of = wanted.new_full((rows, places + 1), EMPTY).scatter_(1, resident.masked_fill(resident < 0, places), slots)
    slot_of[:, places:].fill_(EMPTY)
    at = slot_of.gather(1, wanted.masked_fill(wanted < 0, places))
    missing = (wanted >= 0) & (at < 0)
    empty = resident < 0
    if reuse:
        empty = torch.ones_like(empty, dtype=torch.bool)
        empty = torch.nn.functional.pad(empty, (0, 1)).scatter(1, at.masked_fill(at < 0, n), False)[:, :n]
    empty_first = (~empty).to(torch.int8).argsort(dim=-1, stable=True)
    rank = missing.cumsum(1) - 1
    fits = missing & (rank < empty.sum(1, keepdim=True))
    target = torch.where(fits, empty_first.gather(1, rank.clamp(min=0, max=n - 1)), at)
    kept = (wanted >= 0) & (fits | ~missing)
    # Whatever gets no slot is written to an extra column, which is cut off.
    placed = resident.new_full((rows, n + 1), EMPTY)
    return placed.scatter_(1, torch.where(kept, target, n), wanted)[:, :n]
