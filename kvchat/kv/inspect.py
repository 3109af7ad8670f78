"""Reports which tokens a step read and how much of full attention they cover; every function waits for the GPU.

Coverage is the share of a step's full attention that falls on the tokens it read. It is computed between two steps
from the stored keys. The coverage of the best choice of equally many tokens or pages shows how much a better index
could gain. ``CoverageWatch`` measures coverage while an answer is decoded, a few heads at a time.
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

CHUNK = 128  # pages of keys read at once; this limits the memory on the device
HEADS = 4  # KV heads per sample
COST = 0.005  # share of an answer's time for samples: they stay below 1 % even if other work slows them down
FIRST_S = 0.0005  # assumed cost of a sample before one was timed
LOOKS = 5  # number of samples whose median time counts, because other work may interrupt one
ENOUGH = 4  # samples, from layers far apart; a short answer has no more
GOLDEN = (5**0.5 - 1) / 2
# Share of the attention; speculative mode's budget is chosen for it, and a badge warns below it. Of the facts that full
# mode finds, other modes and budgets found 54 of 60 on SmolLM2 if they covered more, and 24 of 74 if less. On the
# bundled model it says little: 131 of 148 above, 29 of 34 below.
ENOUGH_COVERED = 0.9
BUDGETS = (256, 512, 1024, 2048)  # candidates of ``choose``
LONG = 1024  # stored tokens after which a budget is chosen; it is chosen again whenever they double
LAYERS = 8  # maximum number of layers that ``choose`` samples
MARGIN = 0.03  # the end of a prompt is easier than an answer (0.02), and an index is not exact (0.01)


def attended(state: KVState, layer: int) -> Tensor:
    """Return the mask of stored tokens that the last token's attention read: bool ``[H, total]``.

    After a prefill these are all tokens; after a switch, those that the next token will read.
    """
    g, spec = state.geometry, state.specs[layer]
    seen = torch.full((g.kv_heads, state.total + 1), not state.after_step, device=state.device)
    if state.after_step:
        for slots in state.slots_of[layer]:
            heads = slots.heads_of(layer)
            table = slots.attended_of(layer).long().expand(len(heads), -1)
            # Empty slots mark one extra column, which is removed below.
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
    """Return by stored token the number of (layer, KV head) pairs in which the last token read it, int64 ``[total]``.

    Counts table entries, because masks of all heads took a quarter of a step of sync after 33,000 tokens.
    """
    whole = Counter[range]()  # by range of tokens, the number of pairs that read it
    named = Counter[tuple[DeviceSlots, int, int]]()  # by table and the first token counted, the pairs that read by it
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
    """Return the number of stored tokens that the last token's attention read, int64 ``[layers, H]`` on the host."""
    return torch.stack([_read_in_layer(state, layer) for layer in range(state.geometry.layers)]).cpu()


def held_per_head(state: KVState) -> Tensor:
    """Return the number of stored tokens in slots that attention may read, int64 ``[layers, H]`` on the host."""
    g = state.geometry
    held = torch.zeros((g.layers, g.kv_heads), dtype=torch.int64, device=state.device)
    for layer in range(g.layers):
        for slots in state.slots_of[layer]:
            held[layer, slots.heads_of(layer)] += (slots.table_of(layer) >= 0).sum(-1)
    return held.cpu()


def _read_in_layer(state: KVState, layer: int) -> Tensor:
    """Return the tokens read in one layer, ``[H]``; counted in the tables, without a tensor over all tokens."""
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
    """Return the first token that attention read from ``slots``; it read any earlier ones from the host pool."""
    return max(0, state.total - slots.layout.window) if slots.layout.spills else 0


def read_tokens(state: KVState) -> float:
    """Return the number of tokens read, averaged over layers and KV heads and summed over all steps so far."""
    return state.read_pairs / (state.geometry.layers * state.geometry.kv_heads)


def weights(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """Return the weights of the last token's full attention in KV ``heads``, whatever it read, float32 [H, G, total].

    They are 0 beyond the layer's window. With learned sinks a row sums to less than 1.
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
    """Return the share of each KV head's full attention that falls on the tokens it last read, float32 ``[H]``.

    It is averaged over the query heads, and 1 if the head reads everything that the layer sees.
    """
    read = attended(state, layer)[heads]
    if bool((read.sum(-1) == min(state.total, int(state.sight[layer]))).all()):
        return torch.ones(len(read), device=read.device)
    return (attention_shares(state, layer, heads) * read).sum(-1)


def attention_shares(state: KVState, layer: int, heads: slice = slice(None)) -> Tensor:
    """Return each stored token's share of a KV head's full attention, ``[H, total]``; rows sum to 1."""
    shares = weights(state, layer, heads).mean(1)
    return shares / shares.sum(-1, keepdim=True)


def choose(state: KVState, least: int) -> TokenChoice:
    """Choose the smallest budget whose best tokens cover enough of the last token's attention; the largest if none do.

    The candidates are ``least`` and larger ``BUDGETS``. In any mode this costs at most one token's full attention.
    """
    budgets = [budget for budget in BUDGETS if budget > least]
    numbers = torch.tensor([least, *budgets], device=state.device).expand(state.geometry.kv_heads, -1)
    with torch.inference_mode():
        found = [_sum_of_largest(attention_shares(state, layer), numbers).mean(0) for layer in _looked_at(state)]
        shares = (torch.stack(found).mean(0) - MARGIN).tolist()
    at = next((at for at, share in enumerate(shares) if share >= ENOUGH_COVERED), len(budgets))
    return TokenChoice(f"{state.total:,} stored tokens", round(shares[at], 4), [least, *budgets][at])


def seeing_all(specs: Sequence[AttentionSpec], tokens: int) -> list[int]:
    """Return the layers that see all ``tokens``, without the first, which reads everything; all layers if none do."""
    found = [layer for layer, spec in enumerate(specs) if layer and spec.first_seen(tokens) == 0]
    return found or list(range(len(specs)))


def _looked_at(state: KVState) -> list[int]:
    """Return at most ``LAYERS`` of the layers that see everything, evenly spread over the depth."""
    layers = seeing_all(state.specs, state.total)
    return layers[:: -(-len(layers) // LAYERS)]


def covered_by_tokens(shares: Tensor, read: Tensor) -> Tensor:
    """Return the coverage ``[H]`` of the best ``read [H]`` tokens, those with the largest ``shares [H, total]``."""
    return _sum_of_largest(shares, read.unsqueeze(-1)).squeeze(-1)


def covered_by_pages(shares: Tensor, read: Tensor, page: int) -> Tensor:
    """Return the coverage ``[H]`` of the best pages of ``page`` tokens that together hold at most ``read [H]`` tokens.

    It is 1 if no more tokens than that have a share.
    """
    missing = -shares.shape[1] % page
    whole = torch.nn.functional.pad(shares, (0, missing)).view(len(shares), -1, page).sum(-1)
    everything = read >= (shares > 0).sum(-1)
    numbers = torch.div(read, page, rounding_mode="floor").unsqueeze(-1)
    return torch.where(everything, 1.0, _sum_of_largest(whole, numbers).squeeze(-1))


def _sum_of_largest(shares: Tensor, numbers: Tensor) -> Tensor:
    """Return the sums of the ``numbers [H, m]`` largest ``shares [H, n]``: ``[H, m]``."""
    summed = torch.nn.functional.pad(shares.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    return summed.gather(-1, numbers.clamp(max=shares.shape[1])).clamp(max=1.0)


class CoverageWatch:
    """Samples the coverage of steps, a few heads at a time.

    ``sample`` is called between two steps. It measures only as often as ``COST`` of the time allows, however long the
    conversation and however fast the device. Nothing is measured inside a step, so CUDA graphs are not affected.
    ``clock`` returns seconds.

    Attributes:
        share: mean of the last measured coverage of each head; None before the first sample.
    """

    def __init__(self, state: KVState, clock: Callable[[], float] = time.perf_counter) -> None:
        self._state = state
        self._clock = clock
        g = state.geometry
        parts = [(layer, head) for layer in range(g.layers) for head in range(0, g.kv_heads, HEADS)]
        # Spread by the golden ratio, so that the first few samples are from all depths.
        self._parts = [part for _, part in sorted(((index * GOLDEN) % 1, part) for index, part in enumerate(parts))]
        self._costs = deque([FIRST_S], LOOKS)
        self._next = 0
        self._due = clock()
        self.restart()

    def restart(self) -> None:
        """Forget all samples, which belong to another mode or conversation."""
        self._seen: dict[tuple[int, int], list[float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin another answer; earlier samples count until their heads are sampled again."""
        self._lowest: float | None = None

    @property
    def share(self) -> float | None:
        seen = [share for part in self._seen.values() for share in part]
        return sum(seen) / len(seen) if seen else None

    @property
    def has_seen_enough(self) -> bool:
        """True once so many heads were sampled that no single one dominates the mean."""
        return len(self._seen) >= min(ENOUGH, len(self._parts))

    @property
    def lowest(self) -> float | None:
        """The lowest ``share`` in this answer since enough heads were sampled; before that, ``share``."""
        return self.share if self._lowest is None else self._lowest

    def sample(self) -> None:
        """If a sample is due, wait for the device and measure the next heads that did not read everything."""
        if not self._state.after_step or self._clock() < self._due:
            return
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)  # so that the rest of the step is not timed as the sample's
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
