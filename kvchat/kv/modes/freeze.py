"""freeze: evicts tokens that keep scoring low, for longer each time, and brings them back.

Paper: ASR-KF-EGR (soft freeze, sublinear timers; Algorithm 1, Eqs. 2-3). After each step, every token that was read and
is outside the window of the K most recent ones is scored. Each score below tau flags the token, and the c-th flag
freezes it for ``floor(sqrt(c) / k)`` steps: its slot is freed. ``freeze_timers`` keeps the counts.

``profile="paper"`` is exactly Algorithm 1, at every prompt length. It reproduces the paper's tables (170 read of 514,
119 of 269) if every token outside the window is flagged in every step (``score="always"``), c counts all flags, and a
timer is decremented in the step that sets it. Eq. 2's mean |q.k| (``score="raw"``) is of order 10 to 100, so that the
paper's tau = 0.5 would flag nothing. With this profile the model finds frozen facts only by chance. Pinned messages and
a budget, even one from a GPU's profile, are not part of Algorithm 1 but apply if given.

The default profile departs from it for these reasons and at these costs:
    * Recall while frozen. The paper restores a token when its timer runs out, not when it is needed, and so loses facts
      (its section 4.3 asks before anything has frozen). Here, in each layer and KV head, the query of each step recalls
      the page that gets more than half of the weight over all pages, by their bounds as in speculative mode. From the
      next step on its tokens are read, and their flags are reset. This costs the page bounds on the device (a 32nd of
      the K/V), one product with them per step, and a few hundred more tokens read.
    * A token that scores above 32 tau is being copied, so it and the following tokens, 16 in total, are read from the
      next step on, and their flags are reset. If tokens were only scored one by one, the last digits of a number would
      freeze while the first are looked at, and the answer would end there. In conversations of several turns this finds
      38 of 40 facts instead of 27, with as many tokens read (33 of 40 other facts, not used for tuning; full finds 35
      and 37).
    * Score ``prob_rel``: the softmax probability, renormalized without the sinks, times the number of tokens read
      except sinks; averaged over heads and over the layers that can see the token. An equal share is 1.
    * c is halved when a token scores above tau, so that it does not freeze at once after it was relevant. Eq. 3's
      history window W is left out: the paper gives no value, and its tables rule it out.
    * The first 4 tokens and the chat's control tokens never freeze, because attention depends on them.
    * Nothing freezes while fewer than 400 tokens (``floor``) are read; above that the least relevant freeze first. So
      short conversations save nothing and lose nothing. First freezes are spread over 64 steps by position; otherwise
      all tokens of a prompt would leave and return in the same steps.
    * ``budget`` limits the tokens read: the least relevant ones wait, and the longer they wait, the sooner they return.
      It overrides recall, so facts are lost. Therefore a budget set for another mode does not apply here.
    * All layers and heads share one choice, because Eq. 2 averages over heads and does not mention layers.
    * A step copies at most 1,024 tokens to the device, or a 32nd of all if that is more, the most relevant first; the
      others wait. Many timers run out together: after 2,000 tokens of books (the bundled model, SmolLM2; 200 steps),
      half of the steps copied one token, the worst 725, and the step after FR 1,800. For an 8B after 32,768 tokens,
      these would be 1.6 and 3.9 GB, or 57 and 141 ms over 16 lanes of PCIe 4. A limit of 64 per step copied a fifth as
      much, and the likelihood of three texts hardly changed. A CPU copies nothing.

A prompt reads everything. Tokens frozen before it stay frozen until its last query, or a later one, recalls them. A
regenerated answer begins with the timers of its prompt's end. Pinned messages never freeze, in any profile.

Shapes: one table ``[1, 1, n]``; n follows the most tokens that a step of the last ``RESIZE_INTERVAL`` read. In unified
memory (a CPU) there is only a table: attention reads its tokens in place, and nothing moves. Costs: per layer, a step
adds two matrix-vector products over the weights, and a few dozen operations over the tokens. A step begins by reading
back how many tokens it will read, so that all of them have slots; sampling the last token waited for the same work.
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
from kvchat.kv.modes.base import LEVELS, RECENT, Level, Mode, ModeReport, Plan, Step, TokenState
from kvchat.kv.modes.freeze_timers import FOREVER, CpuTimers, Scores, Timers, freeze_loops, rule_of, state_bytes
from kvchat.kv.modes.page_index import PageBounds
from kvchat.kv.ops.cpu_ops import FREEZE, loops_over, numbers
from kvchat.kv.state import KVState

MAJORITY = 0.5  # share of a KV head's weight over the pages that makes a page hot: at most one page per head
RESIZE_INTERVAL = 64  # number of steps after which unused slots are freed
RESIZE_INTERVAL_IN_PLACE = 8  # reallocating only a table costs nothing
# Spare slots: an eighth, but at least 32 and a quarter of the geometry's headroom, because on a GPU a resize costs a
# new graph, about 0.2 s. In place only a 32nd, because attention reads spare slots too.
MIN_ROOM, ROOM_SHARE = 32, 4
SPARE, SPARE_IN_PLACE = 8, 32
MOST_MOVED, MOVED_SHARE = 1024, 32  # maximum tokens that a step copies: 1,024, or a 32nd of the capacity if more
SHRINK = 0.8  # slots are freed if this share would suffice


class Freeze(Mode):
    """Slots from which irrelevant tokens are evicted for a while."""

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
        self._checked_at = 0
        self._entered_at = -1
        self._read_from: int | None = None  # first position prefilled since the last fill

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
        # If a switch to another mode fails, this mode is re-entered and keeps its timers.
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
            if fresh or self._read_from is not None:  # otherwise the query may be that of a token whose step raised
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
        """Make the slots hold exactly the tokens that the next token reads."""
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
        """Resize the slots for ``needed`` tokens; free slots that were not needed recently."""
        self._peak = max(self._peak, needed)
        n, steps, in_place = self.slots.n, self.state.steps, self.slots.layout.in_place
        due = steps - self._checked_at >= (RESIZE_INTERVAL_IN_PLACE if in_place else RESIZE_INTERVAL)
        if needed <= n and not due:
            return
        spare = self._peak // (SPARE_IN_PLACE if in_place else SPARE)
        size = self.geometry.round_up(self._peak + max(MIN_ROOM, spare, self.geometry.headroom // ROOM_SHARE))
        if due:
            self._peak, self._checked_at = needed, steps
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
        """Return whether a step reads all ``awake`` tokens, that is, may copy all that are missing from the slots."""
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
        if not self.slots.layout.in_place:  # tokens of quantized pages are always copied from the host
            timers.note_held(table, self.slots.held, keeps=self.state.host.quantized_share is None)
        timers.drop_frozen(table)

    def _restore(self, position: Tensor) -> None:
        """Let the step read the tokens that are not frozen; ``prepare_step`` made room for all of them.

        Many tokens return after a step or two and are still in their slots. The most relevant of the others are copied.
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

    # ---- pages that a query looks for

    def _hot_pages(self, position: Tensor) -> Tensor:
        """Return the mask ``[capacity + 1]`` of tokens in pages that got most of a KV head's weight at ``position``."""
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
        """Widen the page bounds by the new token's keys, in all layers at once."""
        keys = torch.stack(self._keys).unsqueeze(2)
        page = torch.div(position, self.geometry.page, rounding_mode="floor").view(1)
        row = torch.maximum(self.bounds.data.index_select(2, page), torch.cat((keys, -keys), -1))
        self.bounds.data.index_copy_(2, page, row)

    def _loops(self) -> ModuleType | None:
        """Return the compiled loops over bounds and keys, if they can be used."""
        loops = freeze_loops() if self.state.ops.reads_back else None
        return loops and loops_over(self.geometry.dtype, FREEZE)

    # ---- for the manager and the interface

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
