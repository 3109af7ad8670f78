"""Reads back what was attended to, and the coverage of that; all of it waits for the GPU.

Coverage is the share of a step's full attention that falls on the tokens it read, computed between two steps from the
stored keys. What the best choice of as many tokens or pages would cover shows how much a better index could gain.
``CoverageWatch`` measures coverage while an answer is decoded, a few heads at a time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median_low

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, capped, softmax
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.modes.sync_heads import TokenChoice
from kvchat.kv.state import KVState

CHUNK = 128  # pages whose keys are looked at together: they bound what it takes on the device
HEADS = 4  # KV heads of one sample
COST = 0.005  # of the time of an answer, for looks: below 1 % where other work slows them too
FIRST_S = 0.0005  # what a sample is taken to cost before one was timed
LOOKS = 5  # of whose times the median counts: other work may come between
ENOUGH = 4  # looks, of layers far from each other: a short answer has no more
GOLDEN = (5**0.5 - 1) / 2
# Of the attention. Of facts that full mode finds, other modes and budgets found 54 of 60 on SmolLM2 where they covered
# more, and 24 of 74 below. On the bundled model it tells little: 131 of 148 above, 29 of 34 below.
ENOUGH_COVERED = 0.9  # speculative mode's budget is chosen for it, and below it a badge warns
BUDGETS = (256, 512, 1024, 2048)  # that a choice is made of
LONG = 1024  # tokens from which on a conversation tells how many are needed, and again at each doubling
LAYERS = 8  # at most, that are looked at for it
MARGIN = 0.03  # the end of a prompt is easier than an answer (0.02), an index knows less than the truth (0.01)


def attended(state: KVState, layer: int) -> Tensor:
    """The stored tokens that the last token's attention read, as a mask: bool ``[H, total]``.

    After a prefill that is all; after a switch, what the next token will read.
    """
    g, spec = state.geometry, state.specs[layer]
    seen = torch.full((g.kv_heads, state.total + 1), not state.after_step, device=state.device)
    if state.after_step:
        for slots in state.slots_of[layer]:
            heads = slots.heads_of(layer)
            table = slots.attended_of(layer).long().expand(len(heads), -1)
            # Empty slots mark one column more, which is cut off.
            columns = torch.where(table >= 0, table, state.total)
            seen[heads] = seen[heads].scatter(1, columns, True)
            if slots.layout.spills:
                seen[heads, : max(0, state.total - slots.layout.window)] = True
    seen = seen[:, : state.total]
    if spec.window is not None:
        positions = torch.arange(state.total, device=state.device)
        seen = seen & (positions > state.total - 1 - spec.window)
    return seen


def attended_counts(state: KVState) -> Tensor:
    """Per stored token the number of (layer, KV head) pairs in which the last token read it, int64 ``[total]``.

    By what the tables name: a mask of each head over all tokens took a quarter of a step of sync after 33,000 tokens.
    """
    whole = Counter[range]()  # ranges of tokens that so many pairs read
    named = Counter[tuple[DeviceSlots, int, int]]()  # tables, each from some token on, that so many pairs read by
    for layer, spec in enumerate(state.specs):
        first = spec.first_seen(state.total)
        if not state.after_step:
            whole[range(first, state.total)] += state.geometry.kv_heads
            continue
        for slots in state.slots_of[layer]:
            ring, heads = _ring(state, slots), slots.layout.width(state.geometry)
            whole[range(first, ring)] += heads
            shared = slots.layout.shared
            named[slots, slots.layout.first if shared else layer, max(first, ring)] += heads if shared else 1
    counts = torch.zeros(state.total, dtype=torch.int64, device=state.device)
    for tokens, pairs in whole.items():
        counts[tokens.start : tokens.stop] += pairs
    read: dict[int, list[Tensor]] = {}
    for (slots, layer, low), pairs in named.items():
        table = slots.attended_of(layer)
        read.setdefault(pairs, []).append(table[table >= low])
    for pairs, found in read.items():
        counts += pairs * torch.bincount(torch.cat(found), minlength=state.total)[: state.total]
    return counts


def read_per_head(state: KVState) -> Tensor:
    """Number of stored tokens that the last token's attention read, int64 ``[layers, H]`` on the host."""
    return torch.stack([_read_in(state, layer) for layer in range(state.geometry.layers)]).cpu()


def held_per_head(state: KVState) -> Tensor:
    """Number of stored tokens in slots that attention may read, int64 ``[layers, H]`` on the host."""
    g = state.geometry
    held = torch.zeros((g.layers, g.kv_heads), dtype=torch.int64, device=state.device)
    for layer in range(g.layers):
        for slots in state.slots_of[layer]:
            held[layer, slots.heads_of(layer)] += (slots.table_of(layer) >= 0).sum(-1)
    return held.cpu()


def _read_in(state: KVState, layer: int) -> Tensor:
    """``[H]``, counted in the tables: nothing as long as the conversation is made."""
    first = state.specs[layer].first_seen(state.total)
    if not state.after_step:
        return torch.full((state.geometry.kv_heads,), state.total - first, device=state.device)
    read = torch.zeros(state.geometry.kv_heads, dtype=torch.int64, device=state.device)
    for slots in state.slots_of[layer]:
        ring = _ring(state, slots)
        table = slots.attended_of(layer)
        read[slots.heads_of(layer)] += (table >= max(first, ring)).sum(-1) + max(0, ring - first)
    return read


def _ring(state: KVState, slots: DeviceSlots) -> int:
    """The first token that attention read in ``slots``; those before it, if any, were read in the host pool."""
    return max(0, state.total - slots.layout.window) if slots.layout.spills else 0


def read_tokens(state: KVState) -> float:
    """Tokens read, mean over layers and KV heads, summed over all steps so far."""
    return state.read_pairs / (state.geometry.layers * state.geometry.kv_heads)


def weights(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """The weights of the last token's full attention in KV ``heads``, whatever it read: float32 ``[H, G, total]``.

    0 beyond the layer's window. With learned sinks a row sums to less than 1.
    """
    g, spec, p = state.geometry, state.specs[layer], state.geometry.page
    query = state.query[layer].float().view(g.kv_heads, g.group, g.d_k)[heads] * spec.scaling
    first = spec.first_seen(state.total)
    parts = [query.new_full((*query.shape[:2], first // p * p), -torch.inf)]
    for page in range(first // p, g.pages(state.total), CHUNK):
        keys, _ = state.host.dense(layer, min(state.total, (page + CHUNK) * p), page)
        parts.append(query @ keys[heads].float().transpose(1, 2))
    scores = capped(torch.cat(parts, -1), spec)
    scores[..., :first] = -torch.inf
    return softmax(scores, None if spec.sinks is None else spec.sinks.view(g.kv_heads, g.group)[heads])


def covered(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """The share of a KV head's attention to stored tokens that falls on those the last step read, float32 ``[H]``.

    The mean over its query heads; 1 where everything is read that the layer may see.
    """
    read = attended(state, layer)[heads]
    if bool((read.sum(-1) == min(state.total, int(state.sight[layer]))).all()):
        return torch.ones(len(read), device=read.device)
    return (attention_shares(state, layer, heads) * read).sum(-1)


def attention_shares(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """Each stored token's share of a KV head's attention to all of them, ``[H, total]``: sums to 1."""
    shares = weights(state, layer, heads).mean(1)
    return shares / shares.sum(-1, keepdim=True)


def choose(state: KVState, least: int) -> TokenChoice:
    """The fewest of ``BUDGETS``, from ``least`` on, whose best tokens cover enough of the last token's attention.

    Looked at in some layers that see everything, whatever the mode reads: no more than one token of full attention.
    Where none covers enough it is the most.
    """
    budgets = [budget for budget in BUDGETS if budget > least]
    numbers = torch.tensor([least, *budgets], device=state.device).expand(state.geometry.kv_heads, -1)
    with torch.inference_mode():
        found = [_sum_of_largest(attention_shares(state, layer), numbers).mean(0) for layer in _looked_at(state)]
        shares = (torch.stack(found).mean(0) - MARGIN).tolist()
    at = next((at for at, share in enumerate(shares) if share >= ENOUGH_COVERED), len(budgets))
    return TokenChoice(f"{state.total:,} stored tokens", round(shares[at], 4), [least, *budgets][at])


def seeing_all(specs: Sequence[AttentionSpec], tokens: int) -> list[int]:
    """The layers after the first, which is read in full, that see all ``tokens``; all layers if there are none."""
    found = [layer for layer, spec in enumerate(specs) if layer and spec.first_seen(tokens) == 0]
    return found or list(range(len(specs)))


def _looked_at(state: KVState) -> list[int]:
    """At most ``LAYERS`` of the layers that see everything, of all depths."""
    layers = seeing_all(state.specs, state.total)
    return layers[:: -(-len(layers) // LAYERS)]


def covered_by_tokens(shares: Tensor, read: Tensor) -> Tensor:
    """The coverage ``[H]`` of the best ``read [H]`` tokens: those with the largest ``shares [H, total]``."""
    return _sum_of_largest(shares, read.unsqueeze(-1)).squeeze(-1)


def covered_by_pages(shares: Tensor, read: Tensor, page: int) -> Tensor:
    """The coverage ``[H]`` of the best pages of ``page`` tokens that together hold at most ``read [H]`` tokens.

    1 if as many tokens are read as have a share.
    """
    missing = -shares.shape[1] % page
    whole = torch.nn.functional.pad(shares, (0, missing)).view(len(shares), -1, page).sum(-1)
    everything = read >= (shares > 0).sum(-1)
    numbers = torch.div(read, page, rounding_mode="floor").unsqueeze(-1)
    return torch.where(everything, 1.0, _sum_of_largest(whole, numbers).squeeze(-1))


def _sum_of_largest(shares: Tensor, numbers: Tensor) -> Tensor:
    """The sums of the ``numbers [H, m]`` largest ``shares [H, n]``: ``[H, m]``."""
    summed = torch.nn.functional.pad(shares.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    return summed.gather(-1, numbers.clamp(max=shares.shape[1])).clamp(max=1.0)


class CoverageWatch:
    """Looks at what was covered of the last step, a few heads at a time, layer after layer.

    ``sample`` is called between two steps, and measures when the time since the last sample pays for another: ``COST``
    of it goes into samples, however long the conversation and however fast the device. Nothing is measured inside a
    step, so a CUDA graph knows nothing of it. ``clock`` gives seconds.

    Attributes:
        share: mean over the heads of what was covered when each was last looked at; None before the first sample.
    """

    def __init__(self, state: KVState, clock: Callable[[], float] = time.perf_counter) -> None:
        self._state = state
        self._clock = clock
        g = state.geometry
        parts = [(layer, head) for layer in range(g.layers) for head in range(0, g.kv_heads, HEADS)]
        # Spread by the golden ratio: the first few are of all depths.
        self._parts = [part for _, part in sorted(((index * GOLDEN) % 1, part) for index, part in enumerate(parts))]
        self._costs = deque([FIRST_S], LOOKS)
        self._next = 0
        self._due = clock()
        self.restart()

    def restart(self) -> None:
        """Forget what was seen: it was of another mode or conversation."""
        self._seen: dict[tuple[int, int], list[float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin another answer; what was seen counts until it is looked at again."""
        self._lowest: float | None = None

    @property
    def share(self) -> float | None:
        seen = [share for part in self._seen.values() for share in part]
        return sum(seen) / len(seen) if seen else None

    @property
    def has_seen_enough(self) -> bool:
        """True once enough heads were looked at that no single one decides the mean."""
        return len(self._seen) >= min(ENOUGH, len(self._parts))

    @property
    def lowest(self) -> float | None:
        """The lowest ``share`` in this answer since enough heads were seen; ``share`` itself before that."""
        return self.share if self._lowest is None else self._lowest

    def sample(self) -> None:
        """If it is time to, look at the next heads that did not read everything; waits for the device then."""
        if not self._state.after_step or self._clock() < self._due:
            return
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)  # the rest of the step is no cost of the sample
        began = self._clock()
        try:
            with torch.inference_mode():
                self._sample()
        finally:
            ended = self._clock()
            self._costs.append(ended - began)
            self._due = ended + median_low(self._costs) / COST
        share = self.share
        if share is not None and self.has_seen_enough:
            self._lowest = share if self._lowest is None else min(self._lowest, share)

    def _sample(self) -> None:
        for _ in self._parts:
            layer, head = part = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            self._seen[part] = covered(self._state, layer, slice(head, head + HEADS)).tolist()
            if min(self._seen[part]) < 1:
                return
