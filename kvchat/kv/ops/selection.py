"""Selects the pages of each KV head and the copies that this needs: score, top-k, diff (torch reference).

All shapes are fixed, nothing is read back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvchat.kv.memory.device_slots import EMPTY

NOTHING = -1e30  # the logarithm of no mass, finite: the difference of two infinities is no number


@dataclass(frozen=True, eq=False)
class Candidates:
    """The pages ``first`` to ``last`` (0-d int64, inclusive), and ``masked [page]`` (bool), all others."""

    first: int
    last: Tensor
    masked: Tensor

    @classmethod
    def between(cls, first: int, last: Tensor, pages: int) -> Candidates:
        every = torch.arange(pages, device=last.device)
        return cls(first, last, (every < first) | (every > last))


class Asked(NamedTuple):
    """What tokens are chosen by: the ``query [H_q, d_k]``, and keys in ``bits`` bits, ``codes [H, page, words]``.

    ``scaling`` is the layer's, ``means [H, page, d_v]`` are the pages' mean values, if what is not read is joined.
    """

    query: Tensor
    codes: Tensor
    bits: int
    scaling: float
    means: Tensor | None = None


class Places(NamedTuple):
    """Positions that divide what a token reads of a conversation: all from ``seen`` up to ``end`` but the candidates.

    The first ``known`` tokens, in full pages, stand in the index; ``first`` to ``last`` (known, not before the first)
    are the candidates.
    """

    known: int
    seen: int
    first: int
    last: int
    end: int


def page_bounds(keys: Tensor, pages: int, page: int) -> Tensor:
    """Element-wise maximum and negated minimum of each page's keys.

    Args:
        keys: ``[H, n, d_k]``; the last page may be partly filled.
        pages: number of pages.
        page: tokens of a page.

    Returns:
        ``[H, pages, 2 * d_k]``, ``[max | -min]``.
    """
    heads, n, d_k = keys.shape
    both = torch.cat((keys, -keys), -1)
    lowest = torch.finfo(keys.dtype).min
    padded = torch.nn.functional.pad(both, (0, 0, 0, pages * page - n), value=lowest)
    return padded.view(heads, pages, page, 2 * d_k).amax(2)


def page_scores(query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
    """Upper bound of each page's attention logit (Quest's bound, FreeKV section 3.2), times ``scaling``.

    Args:
        query: ``[H_q, d_k]``.
        bounds: ``[H, page, 2 * d_k]``, ``[max | -min]``.
        scaling: the layer's attention scale; the paper omits it, its published accurate program too (a departure).

    Returns:
        ``[H, G, page]``
    """
    parts = torch.cat((query, -query), -1).relu_().mul_(scaling)
    return torch.bmm(parts.view(bounds.shape[0], -1, bounds.shape[-1]), bounds.transpose(1, 2))


def needs_correction(query: Tensor, before: Tensor, kv_heads: int, tau: float) -> Tensor:
    """True for KV heads to correct: mean cosine of their queries over the group below ``tau`` (FreeKV section 3.3).

    Args:
        query: ``[H_q, d_k]``.
        before: the last token's, ``[H_q, d_k]``.
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
    """The ``query [H_q, d_k]`` of the KV heads ``corrected [H]``, the one ``before`` of all others."""
    by_head = len(corrected), -1, query.shape[-1]
    return torch.where(corrected[:, None, None], query.view(by_head), before.view(by_head)).view_as(query)


def heaviest(scores: Tensor, hidden: Tensor, masked: Tensor, k: int) -> Tensor:
    """The ``k`` places, tokens or pages, of highest weight of each KV head: softmax in float32, mean over the group.

    Args:
        scores: ``[H, G, n]``.
        hidden: the places that have no weight, bool ``[n]``.
        masked: the places that may not be chosen, bool ``[n]``; the softmax is over them too.
        k: places to choose.

    Returns:
        ``[H, k]`` int64, best first, -1 where there are fewer.
    """
    weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).mean(1)
    # What may not be chosen must lose against one whose weight underflowed to 0.
    return best(weights.masked_fill(masked | hidden, -torch.inf), k)


def of_unread(scores: Tensor, unread: Tensor, excess: Tensor, means: Tensor) -> Tensor:
    """What attention to tokens that are not read would add, by the pages' mean values: a part of it.

    Args:
        scores: logits ``[H, G, n]`` by an index, of whole pages.
        unread: the tokens meant, bool ``[H, n]``.
        excess: how much too high the logarithms of the pages' masses are, ``[H, G, page]``.
        means: the pages' mean values ``[H, page, d_v]``.

    Returns:
        float32 ``[H, G, d_v + 1]``, the logarithm of the sum of exponentials last: ``NOTHING`` where all are read.
    """
    shape = *scores.shape[:2], means.shape[1], -1
    masses = scores.float().masked_fill(~unread.unsqueeze(1), NOTHING).view(shape)
    logs = (masses.logsumexp(-1) - excess).clamp(min=NOTHING)
    total = logs.logsumexp(-1, keepdim=True)
    return torch.cat((torch.bmm((logs - total).exp(), means.float()), total), -1)


def best(scores: Tensor, k: int) -> Tensor:
    """The ``k`` places of highest ``scores [H, n]``, -1 where the others have -inf or no number: int64 ``[H, k]``."""
    values, chosen = scores.topk(min(k, scores.shape[-1]), -1)
    chosen = chosen.masked_fill(~(values > -torch.inf), EMPTY)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=EMPTY)


def are_among(chosen: Tensor, n: int) -> Tensor:
    """Which of ``n`` places are ``chosen [H, k]``, where -1 is none: bool ``[H, n]``."""
    # What is none is marked in one column more.
    marks = torch.zeros((len(chosen), n + 1), dtype=torch.bool, device=chosen.device)
    return marks.scatter(1, chosen.masked_fill(chosen < 0, n), True)[:, :n]


def top_pages(scores: Tensor, masked: Tensor, k: int) -> Tensor:
    """The ``k`` pages that are ``heaviest`` among the candidates alone, those not ``masked`` (FreeKV's MeanS)."""
    return heaviest(scores, masked, masked, k)


def assign_slots(wanted: Tensor, resident: Tensor, places: int, reuse: bool = False) -> Tensor:
    """Assign a slot to each wanted token or page: resident ones stay, the others take empty slots, best first.

    Slots of what is no longer wanted become empty; they are given away at once only to ``reuse`` them, because
    attention may be reading them.

    Args:
        wanted: ``[C, k]`` distinct tokens or pages, best first, -1 = none.
        resident: ``[C, n]`` distinct ones held by each slot, -1 = empty.
        places: how many tokens or pages there are.
        reuse: nothing reads slots of what is not wanted.

    Returns:
        ``[C, n]``, what each slot is to hold, -1 = none. Where empty slots are too few the last wait.
    """
    rows, n = resident.shape
    slots = torch.arange(n, device=resident.device).expand(rows, n)
    # What is none is noted in one column more.
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
    # What has no slot is collected in one column more, which is cut off.
    placed = resident.new_full((rows, n + 1), EMPTY)
    return placed.scatter_(1, torch.where(kept, target, n), wanted)[:, :n]
