"""speculative: chooses single tokens by an index of two-bit keys, on a GPU one layer ahead.

Per layer and KV head a token reads S sinks, the last W tokens and, of all others, the k = budget - S - W tokens of
highest weight: softmax(q . k^ / sqrt(d)), averaged over the group, where k^ are the keys in two bits
(``ops.key_codes``). The softmax is over all tokens in full pages that the layer sees, so that query heads that look
mostly at sinks and window have little influence. Unread tokens are approximated: each page adds its mean value with the
weight that the index gives to its unread tokens (``selection.unread_part``).

Sources, and what is ours: choosing tokens instead of pages (FIER, arXiv 2508.08256, with one bit; Double Sparsity,
arXiv 2408.07092, with some channels), scales per channel (KIVI, arXiv 2402.02750), and estimating a layer's query from
the input of the layer before (InfiniGen, arXiv 2406.19707, with skewed partial weights and a threshold). Here the
estimate applies the layer's own norm, projection and rotation to that input, and the budget is a number of tokens.
Giving the remaining weight to a mean value is from SparQ (arXiv 2312.04985, section 3, with one mean of all tokens).

FreeKV (``profile=paper``, or ``unit=page``) is in ``freekv``. Its bounds rank pages badly: the token that a model looks
for is only one of 32 keys, and every page with large channels has a high bound.

Decisions:
    * ``query``: on a CPU, where nothing runs in parallel, the token's own query chooses (``own``), at no extra cost. On
      a GPU this would wait for the copies in every layer. There the query of layer l is estimated from the input of
      layer l - 1 (``ahead``), so that choosing and copying overlap with layer l - 1. A layer without an estimate (the
      first that chooses, or in a model that does not allow it) chooses with its own query and waits. ``last`` is
      FreeKV's speculation, the query of the step before.
    * Candidates are in full pages, so that each page is encoded once. Therefore the window is at least a page.
    * A layer with a sliding window chooses among the tokens that it sees.
    * On a CPU chosen tokens are read in place: there are no slots, and nothing moves. On a GPU a chosen token keeps its
      slot from step to step, and rows move one by one.
    * The first layer is read in full by default (``first_full``).
    * Unread tokens are approximated (``rest``). Without this the tokens read weigh too much, and a fact weighs too
      little compared with what the model would say anyway. It reduces SmolLM2's divergence from full to a quarter or
      less (``bench/README.md``). The index overestimates a page's weight, which ``key_codes.excess`` corrects on
      average. With capped scores nothing is approximated, because the estimate would need the cap too.
    * Values are not part of the score, because weighting by their length does not help (``bench/README.md``).
    * All tokens are scored, even in long conversations. Ranking pages first and scoring only tokens of the best was
      tried on SmolLM2 (``bench/README.md``), but no small summary ranks pages well. By the lowest and highest keys,
      which the index has anyway, keeping half of the pages loses 0.5 % of all attention and saves a third of the bytes;
      keeping a quarter loses 3 to 5 % and saves half. By mean keys, half of the pages lose 4 to 6 %. A first pass over
      a quarter of the channels loses 0.03 to 0.3 % and saves half, but each head needs its own choice of channels.

Shapes: tables ``[H, k + S + W]``; the index ``[layers, H, page, words]`` (int32, 3 bits per key element for 16-bit K/V)
and mean values ``[layers, H, page, d_v]``. Costs: a step reads both completely, 10.9 % of the K/V that full reads (the
index: 9.4 %). Relative to an 8B's weights in 16 bits this is 3 % after 32K tokens and 12 % after 128K, or 10 and 38 %
in 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvchat.config.modes import SpeculativeParameters
from kvchat.errors import UsageError
from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.modes.base import ModeReport, Plan, Step, budget_of
from kvchat.kv.modes.page_index import IndexedMode, KeyCodes, PageIndex, ValueMeans
from kvchat.kv.ops.selection import Places, TokenQuery
from kvchat.kv.state import KVState
from kvchat.units import percent, size

SINK = 4
QUARTER = 4  # the window is a quarter of the budget, unless the token's own query chooses
BITS = {"bits2": 2, "bits4": 4}


class Speculative(IndexedMode):
    """Sinks, a window and k tokens per layer and KV head."""

    chooses_by_head: ClassVar = True
    parameters: SpeculativeParameters
    index: KeyCodes

    def _set_up(self) -> None:
        p = self.geometry.page
        given = {name: value for name, value in self.parameters.model_dump().items() if value is not None}
        # The measured values belong together, so none is used if the user sets one of them.
        self.wants_choice = given.keys().isdisjoint(("budget", "index", "sink", "window"))
        self.choice = self.traits.choice if self.wants_choice else None
        values: dict[str, Any] = {"index": "bits2", "sink": SINK} | (self.choice.params if self.choice else {}) | given
        budget: int = values.get("budget") or budget_of(self.parameters, self.traits.context)
        self.bits = BITS.get(values["index"], 0)
        # The token's own query also finds recent tokens; an estimated one needs a larger window.
        window = values.get("window", p if self.query == "own" else max(p, budget // QUARTER))
        self._share_out(budget, values["sink"], window, self.parameters.first_full)
        if not self.bits:
            raise UsageError(
                "This index chooses pages, not tokens.",
                f"index = {self.parameters.index} has bounds of pages, but unit = token.",
                f"Set unit=page, or index to one of {', '.join(BITS)}.",
            )
        if self.parameters.tau is not None:
            raise UsageError(
                "tau does not apply to tokens.",
                f"tau = {self.parameters.tau:g} is for unit = page.",
                "Set unit=page, or omit tau.",
            )
        self.k = self.budget - self.sink - self.window
        self._pin_to_sinks()

    @property
    def query(self) -> str:
        """Which query chooses: own, ahead or last."""
        return self.parameters.query or ("own" if self.geometry.unified else "ahead")

    @property
    def wants_ahead(self) -> bool:
        return self.query == "ahead" and self.k > 0

    def plan(self, capacity: int) -> Plan:
        g = self.geometry
        if not g.unified:
            return self._planned(self._layout(capacity, g.pages(min(self.k, g.round_up(capacity)))), capacity)
        size = self.sink + self.k + self.window + len(self.pins)
        return self._planned(Layout(self.first, g.layers, 0, size, shared=False, in_place=True), capacity)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self._estimates: dict[int, Tensor] = {}
        self._unread: dict[int, Tensor] = {}  # by layer, the attention to unread tokens
        self._begun: set[int] = set()  # layers whose tokens were chosen by an estimate in this step

    def fill(self, fresh: bool) -> None:
        super().fill(fresh)
        self._begin(self.state.position, stepping=False)
        for layer in range(self.first, self.geometry.layers):
            self._choose(layer, self.state.query[layer])

    def prepare_step(self) -> Step:
        super().prepare_step()
        for each in self.summaries:
            each.follow(self.state.host)
        return Step(exact=self.state.total + 1 - self.window - self.sink <= self.k)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._begin(position, stepping=True)

    def estimated(self, layer: int, query: Tensor) -> None:
        if layer < self.first:
            return
        if self.state.ops.reads_back:
            self._estimates[layer] = query
            return
        with self.state.transfer.side_stream(layer)(query):
            self._choose(layer, query)
        self._begun.add(layer)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        if layer < self.first:
            return False
        if layer in self._begun:
            self.state.transfer.join(self.state.transfer.side_stream(layer))
        else:
            self._choose(layer, self._choosing_query(layer, query))
        unread = self._unread.get(layer)
        self.slots.other_part = None if unread is None else lambda: unread
        return False

    def choose(self, layer: int, query: Tensor, hidden: Tensor, held: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens ``[H, k]``, none of ``hidden``, that ``query [H_q, d_k]`` chooses for slots with ``held``.

        With ``rest=mean``, also return the attention to all other tokens, ``[H, G, d_v + 1]``.
        """
        return self.state.ops.choose_tokens(self._token_query(layer, query), hidden, self._masked, held)

    def report(self) -> ModeReport:
        chosen = {"budget": self.budget, "sink": self.sink, "window": self.window, "query": self.query}
        chosen["index"] = f"bits{self.bits}"
        stats = {
            "tokens per head": self.k,
            "candidate tokens": max(0, self.state.total + 1 - self.window - self.sink),
            "index": size(sum(each.data.nbytes for each in self.summaries)),
        }
        if self.choice:
            stats |= {"measured on": self.choice.measured_on, "expected to cover": percent(self.choice.covered)}
        return ModeReport(self.parameters.model_dump() | chosen, stats)

    # ---- inside

    def _new_index(self, device: torch.device) -> KeyCodes:
        return KeyCodes(self.geometry, device, self.first, self.bits)

    def _new_summaries(self, device: torch.device) -> Sequence[PageIndex]:
        means = [ValueMeans(self.geometry, device, self.first)] if self.parameters.rest == "mean" else []
        return [self._new_index(device), *means]

    def _choosing_query(self, layer: int, query: Tensor) -> Tensor:
        if self.query == "ahead":
            return self._estimates.get(layer, query)
        return self.state.query[layer] if self.query == "last" else query

    def _begin(self, position: Tensor, stepping: bool) -> None:
        """Prepare to choose for the token at ``position`` (0-d), which is stored and read too if ``stepping``."""
        self._stepping = stepping
        self._estimates.clear()
        self._begun.clear()
        self._unread.clear()
        if self.slots.layout.in_place or not self.k:
            return
        # Once per step for all layers, and before the side streams begin, because both read it.
        page = self.geometry.page
        tokens = torch.arange(self.index.pages * page, device=position.device)
        self._masked = (tokens < self.sink) | (tokens > position - self.window)
        if self.pins:
            self._masked |= self._is_pinned(tokens)
        unknown = tokens >= position - position % page  # the index has only full pages
        self._hidden: dict[int | None, Tensor] = {None: unknown}
        for window in {spec.window for spec in self.state.specs[self.first :]}:
            if window is not None:
                self._hidden[window] = unknown | (tokens <= position - window)

    def _choose(self, layer: int, query: Tensor) -> None:
        """Let the layer's attention read the tokens that ``query [H_q, d_k]`` chooses."""
        if self.slots.layout.in_place:
            self._list(layer, query)
            return
        if not self.k:
            return
        state = self.state
        # A window noted only after the step began is not in ``_hidden``, but attention masks tokens outside it anyway.
        hidden = self._hidden.get(state.specs[layer].window, self._hidden[None])
        held = self.slots.table_of(layer)[:, : min(self.k, self.slots.offset)]
        chosen, unread = self.choose(layer, query, hidden, held)
        state.transfer.load_tokens(self.slots, layer, 0, chosen, held)
        if unread is not None:
            self._unread[layer] = unread

    def _token_query(self, layer: int, query: Tensor) -> TokenQuery:
        spec = self.state.specs[layer]
        # Unread tokens are not joined outside a step, if nothing is chosen, if scores are capped or with ``rest=none``.
        joins = self._stepping and self.k and spec.softcap is None and len(self.summaries) > 1
        means = self.summaries[1].of(layer) if joins else None
        return TokenQuery(query, self.index.of(layer), self.bits, spec.scaling, means)

    def _list(self, layer: int, query: Tensor) -> None:
        """List in the layer's table the tokens that the next token reads, itself included in a step."""
        state, position = self.state, self.state.total
        seen = state.specs[layer].first_seen(position + 1)
        first, last = max(self.sink, seen), position - self.window
        candidates = last + 1 - first - sum(first <= pin <= last for pin in self.pins)
        if candidates <= self.k:
            self.slots.list_range(layer, seen, position + self._stepping)
            return
        known = position - position % self.geometry.page
        places = Places(known, seen, first, last, position + self._stepping)
        asked = self._token_query(layer, query), places, self.k, self.pin_mask, self._stepping
        if (unread := state.ops.list_tokens(self.slots, layer, *asked)) is not None:
            self._unread[layer] = unread
