"""Chooses pages or tokens for each KV head: scores, top-k, and which slots change (torch reference).

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
    """The pages ``first`` to ``last`` (0-d int64, inclusive); ``masked [page]`` is true for all others."""

    first: int
    last: Tensor
    masked: Tensor

    @classmethod
    def between(cls, first: int, last: Tensor, pages: int) -> Candidates:
        every = torch.arange(pages, device=last.device)
        return cls(first, last, (every < first) | (every > last))


class TokenQuery(NamedTuple):
    """What tokens are chosen by: a ``query [H_q, d_k]`` and keys in ``bits`` bits, ``codes [H, page, words]``.

    ``scaling`` is the layer's; ``means [H, page, d_v]`` are the pages' mean values if unread tokens are joined.
    """

    query: Tensor
    codes: Tensor
    bits: int
    scaling: float
    means: Tensor | None = None


class Places(NamedTuple):
    """Positions: a token reads all from ``seen`` up to ``end`` except the candidates, of which some are chosen.

    ``first`` to ``last`` (inclusive) are the candidates. The index has the first ``known`` tokens, in full pages, and
    all candidates are among them.
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
    """The ``k`` tokens or pages of highest weight of each KV head: softmax in float32, mean over the group.

    Args:
        scores: ``[H, G, n]``.
        hidden: those that have no weight, bool ``[n]``.
        masked: those that may not be chosen, bool ``[n]``; the softmax is over them too.
        k: how many to choose.

    Returns:
        ``[H, k]`` int64, best first, -1 where there are fewer.
    """
    weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).mean(1)
    # -inf, because even a weight that underflowed to 0 must win against what may not be chosen.
    return best(weights.masked_fill(masked | hidden, -torch.inf), k)


def unread_part(scores: Tensor, unread: Tensor, excess: Tensor, means: Tensor) -> Tensor:
    """The part of attention that falls on unread tokens, estimated by their pages' mean values.

    Args:
        scores: logits ``[H, G, n]`` by an index, of whole pages.
        unread: which tokens are not read, bool ``[H, n]``.
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
    """The indices of the ``k`` highest ``scores [H, n]``, -1 if only -inf or NaN are left: int64 ``[H, k]``."""
    values, chosen = scores.topk(min(k, scores.shape[-1]), -1)
    chosen = chosen.masked_fill(~(values > -torch.inf), EMPTY)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=EMPTY)


def mask_of(chosen: Tensor, n: int) -> Tensor:
    """The mask ``[H, n]`` of the indices ``chosen [H, k]``, where -1 is none."""
    # -1 marks one more column, which is cut off.
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
        reuse: nothing reads the slots of what is not wanted.

    Returns:
        ``[C, n]``, what each slot is to hold, -1 = none. Where empty slots are too few the last wait.
    """
    rows, n = resident.shape
    slots = torch.arange(n, device=resident.device).expand(rows, n)
    # -1 writes to one more column, which is then cleared.
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
    # What gets no slot is written to one more column, which is cut off.
    placed = resident.new_full((rows, n + 1), EMPTY)
    return placed.scatter_(1, torch.where(kept, target, n), wanted)[:, :n]
