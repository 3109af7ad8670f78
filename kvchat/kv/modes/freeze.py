"""freeze: irrelevant tokens leave the device for growing times and return.

Paper: ASR-KF-EGR (soft freeze, sublinear timers; Algorithm 1, Eqs. 2-3). After each step every active token outside the
window of the K most recent is scored. One that scores below tau is flagged for the c-th time and frozen for
``floor(sqrt(c) / k)`` steps: it gives up its slot, which the next token or the next returning one takes. All that
return in a step come with one copy a layer. ``freeze_timers`` keeps the counts.

Departures and decisions:
    * Score ``prob_rel``: the softmax probability, renormalized without the sinks, times the number of active tokens but
      sinks, mean over heads and over the layers that can see the token; 1 is an equal share. ``prob_max`` is that of
      the keenest head of any layer: a token that one head needs stays, where the mean would outvote that head. Of what
      the token scored before, ``smooth`` counts too. Eq. 2's raw |q.k| is of order 10 to 100, so that tau = 0.5 would
      flag nothing; it is there as ``raw``, and with scaling as ``scaled``.
    * The floor ``min_active``, at which the least relevant leave first, decides between what is saved and perplexity.
    * One choice for all layers and heads, or one per layer (``per_layer``).
    * A timer does not fall in the step it is set in; c halves when a token scores above tau; c counts at most
      ``history`` flags, so a token stays away 8 steps at most; sinks and control tokens stay; first freezes are
      staggered by position; a floor and a ceiling on active tokens; at most ``moves`` return in a step, most relevant
      and longest waiting first. ``profile="paper"`` undoes all of these.
    * A new turn is a new topic: it is read exactly, then all tokens are active and their counts restart (``wake``).
      If only tokens woke that its last token finds relevant, facts of earlier turns would not be found: the bundled
      model attends to a number when it is about to repeat it, not when it is asked for it. The ceiling ``max_active``
      takes that risk: it keeps what the last token finds relevant.

Shapes: one table ``[1, 1, n]``; n follows the number of active tokens every ``RESIZE_INTERVAL`` steps (the only time it
is read), with room for that many new tokens; returning tokens take what room is left, the rest waits.
Costs: a step adds two matrix-vector products over the weights a layer, and a few dozen operations over the tokens.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvchat.config.modes import FreezeParameters
from kvchat.errors import UsageError
from kvchat.kv.attention import Weights, attend
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.modes.base import Mode, ModelTraits, ModeReport, Plan, TokenState
from kvchat.kv.modes.freeze_scores import WEIGHED, Scores
from kvchat.kv.modes.freeze_timers import Timers, state_bytes
from kvchat.kv.modes.recovery_levels import LEVELS, RECENT, Level
from kvchat.kv.state import KVState

RESIZE_INTERVAL = 16  # steps between two looks at the number of active tokens
MIN_ROOM = 32  # spare slots for returning tokens: max(32, active // 8); resize when fewer than half are left
ROOM_SHARE = 4  # of the geometry's headroom, where that is more: on a GPU other slots are another graph, about 0.2 s
SHRINK = 0.8  # shrink when this share of the slots would suffice

PAPER: dict[str, Any] = {
    "score": "always",
    "smooth": 0.0,
    "k": 2.0,
    "sink": 0,
    "protect": False,
    "history": 0,
    "stagger": 1,
    "same_step": True,
    "min_active": 0,
    "moves": 2**20,
}


class Freeze(Mode):
    """Token slots that irrelevant tokens leave; ``timers`` and scores for each group of slots."""

    name = "freeze"
    recovery_levels = LEVELS

    def __init__(
        self, parameters: FreezeParameters, geometry: Geometry, traits: ModelTraits, preamble: int = 0
    ) -> None:
        super().__init__(parameters, geometry, traits, preamble)
        unset = {name: value for name, value in PAPER.items() if name not in parameters.model_fields_set}
        self.rule = parameters.model_copy(update=unset if parameters.profile == "paper" else {})
        self.sink, self.window = self.rule.sink, self.rule.window
        self._refuse_small_ceiling()
        self.timers: list[Timers] = []
        self._sizes: list[int] = []
        self._measured_at = 0
        self._certain = 0
        self._known = 0

    def plan(self, capacity: int) -> Plan:
        layers = self.geometry.layers
        ends = list(range(layers + 1)) if self.rule.per_layer else [0, layers]
        most = min(capacity, self.rule.max_active or capacity)
        sizes = self._sizes or [most + RESIZE_INTERVAL] * (len(ends) - 1)
        layouts = [
            Layout(first, last, sink=0, window=size, unordered=True)
            for (first, last), size in zip(pairwise(ends), sizes, strict=True)
        ]
        return Plan(layouts, len(layouts) * state_bytes(capacity))

    def attach(self, state: KVState) -> None:
        super().attach(state)
        # When a switch to another mode fails this one is entered again, and goes on.
        if not self.timers:
            self.timers = [Timers(self.rule, state.device, self.geometry.headroom) for _ in state.slots]
            self.thawed = torch.zeros((), dtype=torch.int64, device=state.device)
            self._entered_at = state.steps

    # ---- between steps

    def fill(self, fresh: bool) -> None:
        total, most = self.state.total, self.rule.max_active
        for slots, timers in zip(self.state.slots, self.timers, strict=True):
            timers.reserve(total)
            timers.truncate(total)
            if self.rule.wake and total > self._known:
                timers.restart(total)
            over = most is not None and int((~timers.frozen[:total]).sum()) >= most
            if over or bool(timers.frozen[:total].any()):
                self._look_again(slots, timers)
            if most is not None:
                timers.limit(total, most - 1, self.state.pinned)
        self._known = total
        self._bring()

    def recover(self, level: Level) -> None:
        for timers in self.timers:
            frozen = timers.frozen[: self.state.total]
            if level == "SR":
                timers.wake(frozen & (timers.timer[: len(frozen)] > 1))
            elif level == "WR":
                timers.wake(frozen & (timers.since[: len(frozen)] >= self.state.total - RECENT))
            else:
                timers.wake(frozen)
                timers.detections.copy_(torch.where(timers.detections > 0, timers.detections // 2, timers.detections))
                timers.hold.fill_(RECENT)
            if self.rule.max_active is not None:
                timers.limit(self.state.total, self.rule.max_active - 1, self.state.pinned)
        self._bring()

    def _look_again(self, slots: DeviceSlots, timers: Timers) -> None:
        """Score all tokens by the last token's queries; the frozen ones that are relevant wake."""
        state, total = self.state, self.state.total
        positions = torch.arange(total, device=state.device)
        scores = Scores(self.rule, positions)
        for layer in range(slots.layout.first, slots.layout.last):
            spec = state.specs[layer]
            if spec is not None:
                keys, values = state.host.dense(layer, total)
                query = state.query[layer].view(len(keys), -1, keys.shape[-1])
                masked = positions <= total - 1 - (spec.window or total)
                bias = torch.zeros(total, dtype=keys.dtype, device=state.device).masked_fill(masked, -torch.inf)
                sinks = None if spec.sinks is None else spec.sinks.view(len(keys), -1)
                weights = attend(query, keys, values, bias.view(1, 1, -1), spec, sinks)[1]
                scores.add(Weights(weights), query, keys, spec, state.position - 1)
        timers.score[:total] = scores.result()
        timers.wake(timers.score[:total] >= self.rule.tau)

    def _bring(self) -> None:
        """Make the slots hold exactly the active tokens."""
        self._measure()
        self._resize()
        for slots, timers in zip(self.state.slots, self.timers, strict=True):
            frozen, table = timers.frozen[: self.state.total], slots.table[0, 0].clone()
            held = table[table != EMPTY].long()
            table[(table != EMPTY) & timers.frozen[table.long()]] = EMPTY
            missing = ~frozen
            missing[held] = False
            positions = missing.nonzero().flatten()
            free = (table == EMPTY).nonzero().flatten()
            table[free[: len(positions)]] = positions.to(torch.int32)
            self.state.transfer.load_table(slots, table.expand_as(slots.table))

    def _resize(self) -> None:
        """Resize the slots; where memory runs out the present ones serve as long as the active tokens have room."""
        present = [slots.n for slots in self.state.slots]
        try:
            self.state.resize(self.plan(self.state.capacity).layouts, self.state.capacity)
        except torch.OutOfMemoryError:
            active = [self.state.total - int(t.frozen[: self.state.total].sum()) for t in self.timers]
            if any(tokens + RESIZE_INTERVAL > n for tokens, n in zip(active, present, strict=True)):
                raise
            self._sizes = present

    def _measure(self) -> bool:
        """Note how many slots are wanted for what is active; has it changed?"""
        self._measured_at = self.state.steps
        total, first = self.state.total, math.ceil(self.rule.k**2)
        active = [total - int(timers.frozen[:total].sum()) for timers in self.timers]
        sizes = [self._size(slots.n, tokens) for slots, tokens in zip(self.state.slots, active, strict=True)]
        changed, self._sizes = sizes != [slots.n for slots in self.state.slots], sizes
        flags = max([int(timers.detections[:total].max()) for timers in self.timers] if total else [0])
        self._certain = total + max(1, first - max(flags, 0)) if min(active) == total else 0
        return changed

    def _size(self, n: int, active: int) -> int:
        """Slots for ``active`` tokens where there are ``n`` now; ``n`` as long as it suffices."""
        least, most = max(MIN_ROOM, active // 8), self.rule.max_active
        ahead = self.geometry.headroom // ROOM_SHARE
        ahead = ahead if most is None else min(ahead, most - active)
        wanted = self.geometry.round_up(active + RESIZE_INTERVAL + max(least, ahead))
        return wanted if active + RESIZE_INTERVAL + least // 2 > n or wanted < SHRINK * n else n

    # ---- a step

    def prepare_step(self) -> bool:
        changed = self.state.steps - self._measured_at >= RESIZE_INTERVAL and self._measure()
        self._known = self.state.total + 1
        for timers in self.timers:
            timers.reserve(self._known)
        return changed

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._scores = [Scores(self.rule, slots.table[0, 0]) for slots in self.state.slots]

    def attention_begin(self, layer: int, query: Tensor, key: Tensor, spec: AttentionSpec) -> bool:
        return self.rule.score in WEIGHED

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        index = layer if self.rule.per_layer else 0
        keys = self.state.slots[index].keys(layer)
        grouped = query.view(len(keys), -1, query.shape[-1])
        self._scores[index].add(weights[0] if weights else None, grouped, keys, spec, self.state.position)

    def forward_end(self, position: Tensor) -> None:
        for slots, timers, scores in zip(self.state.slots, self.timers, self._scores, strict=True):
            leaves = timers.observe(position, slots.table[0, 0], scores.result(), self.state.pinned)
            slots.table.masked_fill_(leaves, EMPTY)
            self._thaw(slots, timers)

    def _thaw(self, slots: DeviceSlots, timers: Timers) -> None:
        """The most urgent tokens return, as many as may move and have room."""
        urgency = timers.urgency()
        most = min(self.rule.moves, slots.n, len(urgency))
        value, positions = urgency.topk(most)
        active = (slots.table != EMPTY).sum()
        room = slots.n - RESIZE_INTERVAL - active
        if self.rule.max_active is not None:
            room = room.clamp(max=self.rule.max_active - 1 - active)
        taken = (value > 0) & (torch.arange(most, device=value.device) < room)
        self.state.transfer.load_into_free(slots, positions, slots.free_slots(most), taken)
        timers.frozen[positions] &= ~taken
        self.thawed += taken.sum()
        layers = slots.layout.last - slots.layout.first
        self.state.transfer.count_wanted((active + taken.sum()) * (layers * self.geometry.kv_heads))

    def graph_buffers(self) -> list[Tensor]:
        states = [[t.detections, t.timer, t.since, t.score, t.frozen, t.hold] for t in self.timers]
        return [self.thawed, *(tensor for state in states for tensor in state)]

    # ---- what others read

    def is_exact(self, tokens: int) -> bool:
        # Conservative: between two looks it is not known whether a token that could be frozen was.
        never = max(self.rule.min_active, self.sink + self.window) + 1
        return (
            tokens <= (min(never, self.rule.max_active) if self.rule.max_active else never) or tokens <= self._certain
        )

    def report(self) -> ModeReport:
        return ModeReport(self.rule.model_dump(), self._stats(), TokenState.FROZEN, resident_share=0.5)

    def _stats(self) -> dict[str, Any]:
        frozen = [timers.frozen[: self.state.total] for timers in self.timers]
        away = sum(int(mask.sum()) for mask in frozen)
        waits = sum(int(t.timer[: len(m)][m].clamp(min=0).sum()) for t, m in zip(self.timers, frozen, strict=True))
        steps = self.state.steps - self._entered_at
        return {
            "frozen now": away // len(frozen),
            "mean timer": round(waits / away, 1) if away else 0.0,
            "mean thaws": round(int(self.thawed) / len(frozen) / steps, 1) if steps else 0.0,
        }

    def _refuse_small_ceiling(self) -> None:
        least, most = max(self.rule.min_active, self.sink + self.window), self.rule.max_active
        if most is not None and most <= least:
            raise UsageError(
                "The freeze mode's ceiling is too small.",
                f"max_active = {most} is not above min_active = {self.rule.min_active} and "
                f"sink + window = {self.sink + self.window}.",
                f"Give a max_active above {least}, or less min_active.",
            )
