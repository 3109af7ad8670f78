"""freeze: irrelevant tokens leave the device for growing times and return.

Paper: ASR-KF-EGR (soft freeze, sublinear timers; Algorithm 1, Eqs. 2-3). After each step every token that was read and
lies outside the window of the K most recent is scored. One that scores below tau is flagged for the c-th time and
frozen for ``floor(sqrt(c) / k)`` steps: it gives up its slot. ``freeze_timers`` keeps the counts.

``profile="paper"`` is Algorithm 1 and nothing else, at every prompt length. Its tables (170 read of 514, 119 of 269)
come out exactly if every token outside the window is flagged at every step (``score="always"``), c counts all flags
and a timer falls in the step that sets it. Eq. 2's mean |q.k| (``score="raw"``) is of order 10 to 100, so that the
paper's tau = 0.5 would flag nothing. What a frozen token knows is then found by chance only: see the measurements.
Pinned messages and a budget, also of a GPU's profile, are no part of it and hold where they are given.

The default profile departs from it; what each departure is for and costs:
    * Recall while frozen. The paper restores a token when its timer runs out, not when it is needed, and so loses facts
      (section 4.3 asks before anything has frozen). Here the query of each step names, in each layer and KV head, the
      page to which it gives more than half of the weight over all pages, by their bounds as in speculative mode; its
      tokens are read from the next step on, with their flags forgotten. Costs the page bounds on the device (a 32nd of
      the K/V), one product with them a step, and some hundred tokens read.
    * A token that scores above 32 tau is being copied: the 16 tokens from it on are read from the next step on, their
      flags forgotten too. Scored one by one, the last digits of a number freeze while its first are looked at, and the
      answer ends there: 27 of 40 facts asked over turns without this, 38 with it, at the same number of tokens read (of
      40 others, on which nothing was chosen, 33; full reads 35 and 37).
    * Score ``prob_rel``: the softmax probability, renormalized without the sinks, times the number of tokens read but
      sinks, mean over heads and over the layers that can see the token; 1 is an equal share.
    * c halves when a token scores above tau: what was relevant again is not put away at once. Eq. 3's history window W,
      for which the paper gives no value and which its tables exclude, is not there.
    * The first 4 tokens and the chat's control tokens never freeze: attention rests on them.
    * Nothing freezes while fewer than 400 tokens (``floor``) are read, above that the least relevant first: short
      conversations save nothing and lose nothing. First freezes are spread over 64 steps by position, because a
      prompt's tokens would all leave and return in the same steps.
    * ``budget`` bounds the tokens read; the least relevant wait, longer ones more urgently. It wins over recall, and
      facts are lost: a budget given to another mode therefore does not count here.
    * One choice for all layers and heads, as Eq. 2 averages over heads and says nothing of layers.
    * A step copies at most 1,024 tokens to the device, or a 32nd of all, the most relevant first; the others wait for
      the next ones. Timers run out together: after 2,000 tokens of books (the bundled model, SmolLM2; 200 steps) half
      of the steps copied one token, the worst 725, and the one after FR 1,800. Of an 8B after 32,768 tokens these would
      be 1.6 and 3.9 GB, 57 and 141 ms over 16 lanes of PCIe 4. With at most 64 a step a fifth was copied, because what
      came one after another freezes so too, and three texts were as likely (4.564, 3.822 and 5.501 nats a token,
      without 4.565, 3.822 and 5.505). A CPU copies nothing.

A prompt is read exactly; what was frozen before it stays so until its last query, or a later one, names it. An answer
that is asked for again begins with the timers of its prompt's end. Pinned messages never freeze, in any profile.

Shapes: one table ``[1, 1, n]``; n follows the most tokens that a step read of the last ``RESIZE_INTERVAL``. In unified
memory (a CPU) it is a table alone: attention reads the tokens that it names where they are stored, nothing moves.
Costs: a step adds two matrix-vector products over the weights a layer, and a few dozen operations over the tokens. It
begins by reading one number from the device, how many tokens it will read, so that all of them have slots; whoever
sampled a token has waited for the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvchat.config.modes import FreezeParameters
from kvchat.errors import UsageError
from kvchat.kv.attention import AttentionSpec, Weights
from kvchat.kv.memory.device_slots import EMPTY, Layout
from kvchat.kv.modes.base import Mode, ModeReport, Plan, Step, TokenState
from kvchat.kv.modes.freeze_timers import FOREVER, CpuTimers, Scores, Timers, freeze_loops, rule_of, state_bytes
from kvchat.kv.modes.page_index import PageBounds
from kvchat.kv.modes.recovery_levels import LEVELS, RECENT, Level
from kvchat.kv.ops.cpu_ops import FREEZE, loops_over, numbers
from kvchat.kv.state import KVState

MAJORITY = 0.5  # of a KV head's weight over the pages: at most one page a head is hot
RESIZE_INTERVAL = 64  # steps after which slots that none of them needed are given back
RESIZE_INTERVAL_IN_PLACE = 8  # a table alone costs nothing to make again
MIN_ROOM = 32  # spare slots: max(32, an eighth), where growing costs no new graph a 32nd: attention reads them too
SPARE, SPARE_IN_PLACE = 8, 32
MOST_MOVED, MOVED_SHARE = 1024, 32  # tokens that a step copies: so many, or a 32nd of those there is room for
ROOM_SHARE = 4  # of the geometry's headroom, where that is more: on a GPU other slots are another graph, about 0.2 s
SHRINK = 0.8  # shrink when this share of the slots would suffice


class Freeze(Mode):
    """Token slots that irrelevant tokens leave."""

    recovery_levels = LEVELS
    parameters: FreezeParameters

    def _set_up(self) -> None:
        self.rule = rule_of(self.parameters)
        self.sink, self.window = self.rule.sink, self.parameters.K
        self._refuse_small_budget()
        self._pin_to_sinks()
        self.rule = replace(self.rule, sink=self.sink)
        self.pin(())
        self._size = 0
        self._peak = 0
        self._looked_at = 0
        self._entered_at = -1
        self._read_from: int | None = None  # where the part of a prompt begins that was read since the last fill

    def pin(self, positions: Sequence[int]) -> None:
        super().pin(positions)
        beyond = self.extra_sinks + len(self.pins)
        self.bound = None if self.parameters.budget is None else self.parameters.budget + beyond

    def plan(self, capacity: int) -> Plan:
        g = self.geometry
        size = self._size or min(capacity, self.bound or capacity)
        layouts = [Layout(0, g.layers, sink=0, window=size, unordered=True, in_place=g.unified)]
        bounds = g.pages(capacity) * g.layers * g.kv_heads * 2 * g.d_k * g.dtype.itemsize if self.rule.recalls else 0
        return Plan(layouts, state_bytes(capacity) + bounds)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        # If a switch to another mode fails this one is entered again and keeps its timers.
        if self._entered_at < 0:
            kind = CpuTimers if state.ops.reads_back else Timers
            self.timers: Timers = kind(self.parameters, state.device, self.geometry.headroom, self.rule)
            self.bounds = PageBounds(self.geometry, state.device)
            self.thawed = torch.zeros((), dtype=torch.int64, device=state.device)
            self._entered_at = state.steps
        self.timers.pin(self.pin_mask if self.pins else None, self.bound)

    # ---- between steps

    def prefilled(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        if self._read_from is None:
            self._read_from = start
        if self.rule.recalls:
            self.bounds.compute(layer, start, keys)

    def fill(self, fresh: bool) -> None:
        total, timers = self.state.total, self.timers
        timers.undo(self.state.steps)
        timers.reserve(total)
        timers.truncate(total)
        if self._read_from is not None:
            timers.begin_answer(total, is_new=total - self._read_from > 1)
        timers.wake(self.pin_mask[:total])
        if self.rule.recalls:
            self.bounds.refresh(self.state.host)
            if fresh or self._read_from is not None:  # else the query may be that of a token whose step raised
                timers.thaw_hot(self._hot_pages(self.state.position - 1))
        self._read_from = None
        if self.bound is not None:
            timers.limit(self.state.position, self.state.control, torch.zeros_like(timers.frozen))
        self._fill_slots()

    def recover(self, level: Level) -> None:
        timers, total = self.timers, self.state.total
        frozen = timers.frozen[:total]
        if level == "SR":
            timers.wake(frozen & (timers.timer[:total] > 1))
        elif level == "WR":
            timers.wake(frozen & (timers.since[:total] >= total - RECENT))
        else:
            timers.wake(frozen)
            timers.detections.copy_(torch.where(timers.detections > 0, timers.detections // 2, timers.detections))
            timers.hold.fill_(RECENT)
        if self.bound is not None:
            timers.limit(self.state.position, self.state.control, torch.zeros_like(timers.frozen))

    def _fill_slots(self) -> None:
        """Make the slots hold exactly the tokens that the next one reads."""
        frozen = self.timers.frozen
        self.slots.held.fill_(EMPTY)
        self._fit(self.timers.num_awake(self.state.total) + 1)
        slots = self.slots
        if slots.layout.in_place:
            self.timers.list_awake(self.state.total, slots.table[0, 0])
            return
        table = slots.table[0, 0].clone()
        table.masked_fill_((table != EMPTY) & frozen[table.long()], EMPTY)
        missing = ~frozen[: self.state.total]
        missing[table[table != EMPTY].long()] = False
        positions = missing.nonzero().flatten()
        free = (table == EMPTY).nonzero().flatten()
        table[free[: len(positions)]] = positions.to(torch.int32)
        self.state.transfer.load_table(slots, table.expand_as(slots.table))

    def _fit(self, needed: int) -> None:
        """Have slots for ``needed`` tokens, and fewer where fewer were needed lately."""
        self._peak = max(self._peak, needed)
        n, steps, in_place = self.slots.n, self.state.steps, self.slots.layout.in_place
        due = steps - self._looked_at >= (RESIZE_INTERVAL_IN_PLACE if in_place else RESIZE_INTERVAL)
        if needed <= n and not due:
            return
        spare = self._peak // (SPARE_IN_PLACE if in_place else SPARE)
        size = self.geometry.round_up(self._peak + max(MIN_ROOM, spare, self.geometry.headroom // ROOM_SHARE))
        if due:
            self._peak, self._looked_at = needed, steps
        if needed > n or size < SHRINK * n:
            self._size = size
            self.state.resize(self.plan(self.state.capacity).layouts, self.state.capacity)

    # ---- a step

    def prepare_step(self) -> Step:
        tokens = self.state.total + 1
        self.timers.reserve(tokens)
        self.timers.save(self.state.steps)
        if self.rule.recalls:
            self.bounds.reserve(self.state.capacity)
            self.bounds.tokens = tokens
        needed = self.timers.num_awake(self.state.total) + 1
        self._fit(needed)
        return Step(exact=needed == tokens and self._all_arrive(needed - 1))

    @property
    def _most_moved(self) -> int:
        return max(MOST_MOVED, self.timers.capacity // MOVED_SHARE) if self.rule.recalls else FOREVER

    def _all_arrive(self, awake: int) -> bool:
        """True if a step can read all ``awake`` tokens: no more are missing from the slots than it may move."""
        table, held = self.slots.table[0, 0], self.slots.held
        if self.slots.layout.in_place or awake <= self._most_moved:
            return True
        return awake - self.timers.num_awake_in_slots(table, held) <= self._most_moved

    def forward_begin(self, position: Tensor) -> None:
        self._restore(position)
        super().forward_begin(position)
        self._scores = Scores(self.parameters.score, self.sink, self.slots.table[0, 0])
        self._keys = list[Tensor]()

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        self._keys.append(key)
        return self.parameters.score == "prob_rel"

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        if weights:
            self._scores.add_shares(weights[0], spec, self.state.position)
        else:
            self._scores.add_products(query, self.state.ops.keys(self.slots, layer), spec, self.state.position)

    def forward_end(self, position: Tensor) -> None:
        table, timers = self.slots.table[0, 0], self.timers
        hot = None
        if self.rule.recalls:
            self._widen_bounds(position)
            hot = self._hot_pages(position)
        timers.observe(position, table, self._scores.result(), self.state.control, hot)
        if not self.slots.layout.in_place:  # quantized pages come from the host
            timers.note_held(table, self.slots.held, keeps=self.state.host.quantized_share is None)
        timers.drop_frozen(table)

    def _restore(self, position: Tensor) -> None:
        """Let the step read what is not frozen; ``prepare_step`` made room for all of it.

        Many tokens return after a step or two. If a token's slot was not reused it is still there; of the others the
        most relevant are copied.
        """
        slots, timers, table = self.slots, self.timers, self.slots.table[0, 0]
        if slots.layout.in_place:
            self.thawed += timers.list_awake(self.state.total, table)
        else:
            reopened = timers.reopen(table, slots.held)
            positions, taken = timers.missing(position, table, self._most_moved)
            targets = timers.slots_to_reuse(table, slots.held, len(positions))
            self.state.transfer.load_into_free(slots, positions, targets, taken)
            self.thawed += reopened + taken.sum()
        layers = slots.layout.last - slots.layout.first
        self.state.transfer.count_wanted((slots.table != EMPTY).sum() * (layers * self.geometry.kv_heads))

    # ---- pages that a query asks for

    def _hot_pages(self, position: Tensor) -> Tensor:
        """Mask ``[capacity + 1]`` of tokens in pages to which a KV head gave most of its weight at ``position``."""
        g, bounds, index = self.geometry, self.bounds.data, self.timers.index
        if loops := self._loops():
            hot = torch.zeros_like(self.timers.frozen)
            query = self.state.query.float().view(g.layers, g.kv_heads, g.group, g.d_k)
            states = (numbers(tensor) for tensor in (query, bounds, self.state.scales, self.state.sight))
            loops.mark_hot(*states, int(position), g.page, MAJORITY, hot.numpy())
            return hot
        pages = torch.arange(bounds.shape[2], device=bounds.device)
        masked = (pages * g.page > position) | ((pages + 1) * g.page <= position + 1 - self.state.sight.view(-1, 1))
        scores = self.state.ops.page_scores(self.state.query.flatten(0, 1), bounds.flatten(0, 1), 1.0)
        scores = scores.float().view(g.layers, g.kv_heads, g.group, -1) * self.state.scales.view(-1, 1, 1, 1)
        share = scores.masked_fill(masked[:, None, None], -torch.inf).softmax(-1).mean(2).nan_to_num().amax((0, 1))
        page = torch.div(index, g.page, rounding_mode="floor").clamp(max=len(share) - 1)
        return (share > MAJORITY)[page] & (index <= position)

    def _widen_bounds(self, position: Tensor) -> None:
        """Let the bounds cover the new token's keys, of all layers at once."""
        keys = torch.stack(self._keys).unsqueeze(2)
        page = torch.div(position, self.geometry.page, rounding_mode="floor").view(1)
        row = torch.maximum(self.bounds.data.index_select(2, page), torch.cat((keys, -keys), -1))
        self.bounds.data.index_copy_(2, page, row)

    def _loops(self) -> ModuleType | None:
        """The compiled loops over bounds and keys, where they can be used."""
        loops = freeze_loops() if self.state.ops.reads_back else None
        return loops and loops_over(self.geometry.dtype, FREEZE)

    # ---- what others read

    def graph_buffers(self) -> list[Tensor]:
        own = [self.bounds.data] if self.rule.recalls else []
        return [*super().graph_buffers(), self.thawed, *self.timers.buffers(), *own]

    def report(self) -> ModeReport:
        capped = self.parameters.budget is not None
        badges = (f"capped: {self.parameters.own['budget']}",) if capped else ()
        return ModeReport(
            self.parameters.model_dump(), self._stats(), TokenState.FROZEN, resident_share=0.5, badges=badges
        )

    def _stats(self) -> dict[str, Any]:
        timers = self.timers
        frozen = timers.frozen[: self.state.total]
        away, steps = int(frozen.sum()), self.state.steps - self._entered_at
        waits = int(timers.timer[: len(frozen)][frozen].clamp(min=0).sum())
        return {
            "frozen now": away,
            "mean timer": round(waits / away, 1) if away else 0.0,
            "restored per step": round(int(self.thawed) / steps, 1) if steps else 0.0,
        }

    def _refuse_small_budget(self) -> None:
        least, budget = self.sink + self.window, self.parameters.budget
        if budget is not None and budget <= least:
            raise UsageError(
                "The freeze budget is too small.",
                f"budget = {budget} tokens is not above sinks + K = {self.sink} + {self.window} = {least}.",
                f"Use a budget above {least}, or a smaller K.",
            )
