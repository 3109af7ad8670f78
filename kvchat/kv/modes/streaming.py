"""streaming: StreamingLLM with Lazy Pruning, Slack and Max_Drop.

Paper: "Lazy Pruning, Slack, Max_Drop" (Start+Recent streaming), Algorithm 1 and Eqs. 1-8; StreamingLLM (Xiao et al.).
Attention reads the first S tokens and the recent ones; C = budget. When the number of cached tokens L reaches C + R,
the oldest recent tokens are dropped until L* remain (Eq. 8). Dropped tokens stay in the host pool.

Departures:
    * C = budget = S + W + B. B, the paper's non-core tokens, are more recent tokens: Algorithm 1 keeps the first S and
      the last L* - S tokens, whatever they are called. The paper only names overlap and refresh.
    * Within the model's context a prompt reads everything, even dropped tokens, because the paper's prompts are shorter
      than C. This costs one pass over the host pool; decoded tokens still do not read dropped tokens.
    * Beyond the context a prompt is read in chunks of at most C tokens. Each reads sinks, tokens that were not dropped,
      and itself; before each, the cache is pruned. The paper prunes before every token. So a conversation never ends,
      but no other mode can continue it. Positions start again from the context's middle (``context_policy``).
    * Eq. 4 rotates all W recent keys after each prune. Here recent keys stay at their true positions, and the S sink
      keys are rotated forward by the number of dropped tokens. RoPE attention depends on position differences only, and
      these are the same, so the result is the same, at O(S) instead of O(W). The rotation always starts from the
      canonical sink keys, by the total shift, with angles in float64.
    * A prune takes effect after the step that reaches C + R, as in the paper's program, which prunes the cache that the
      model's forward returned.
    * Layers with a sliding window mask by true positions, so they no longer see sinks that are outside the window.
    * Pinned messages are kept between sinks and recent tokens, beyond the budget. Like a sink, each is rotated by the
      number of tokens dropped after it, so that the kept tokens have contiguous positions.
    * If C, R and pinned messages exceed the model's context, C is reduced, so that no token reads that far.

Defaults: R = 64, delta = 16, sigma = 64. ``profile=paper`` has the paper's example, S = 4, W = 2,044, R = 32,
sigma = 16 and delta = 32 (section 3.4; it publishes no values for its experiments). The departures apply there too, but
the same tokens are read at the same distances as in the paper. The paper has sigma < R; here a prune during decoding
drops delta tokens at a time, and sigma only limits what remains after a long prompt. In the long run attention reads
C + 48 to C + 64 tokens, never C. By Eq. 8, sigma = 0 and delta = 0 are the same algorithm, hard pruning to C.

Shapes: one table ``[1, 1, S + P + ring]`` for all layers and heads, ring = max(C + R, C + sigma + 1) - S, P pinned.
Costs: a step that drops tokens adds a rotation of ``[layers, H, S + P, d]`` keys; nothing is recalled. The host knows
how many tokens a step drops, and each number has its own CUDA graph. Beyond the context, the C kept tokens are loaded
and rotated again after every half context and for every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvchat.config.modes import StreamingParameters
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.memory.device_slots import EMPTY, Layout
from kvchat.kv.modes.base import Mode, ModeReport, Plan, Step, TokenState, budget_of, refuse_small_budget
from kvchat.kv.modes.moving_base import MovingBase
from kvchat.kv.rope import Rotation, cos_sin, rotate
from kvchat.kv.state import KVState

MIN_SINK = 4
SINK_SHARE = 4  # the system prompt's tokens are sinks, up to a quarter of C


def pruned_length(length: int, c: int, r: int, sigma: int, delta: int) -> int:
    """Return how many of ``length`` cached tokens Algorithm 1 keeps.

    ``c`` is the soft capacity, ``r`` the allowed overflow (0 disables pruning), ``sigma`` Slack, ``delta`` Max_Drop.
    """
    if r == 0 or length - c < r:
        return length
    return c if delta == 0 else min(max(length - delta, c), c + sigma)


class Last(NamedTuple):
    """The last step or refill: tokens stored before it, the first token kept after the sinks, and how many it drops."""

    at: int
    kept_from: int
    dropped: int


class Streaming(Mode):
    """Sinks and a lazily pruned window, the same for all layers and heads."""

    chooses_by_head: ClassVar = True
    parameters: StreamingParameters

    def _set_up(self) -> None:
        if self.traits.realign_refusal:
            raise DoesNotFitError(
                "Streaming cannot realign this model's sinks.", self.traits.realign_refusal, "Use another mode."
            )
        p = self.parameters
        if p.budget is None and p.window is not None:
            self.capacity = p.window + p.B + (MIN_SINK if p.sink is None else p.sink)
        else:
            self.capacity = budget_of(p, self.traits.context)
        self.sink = self._sinks()
        self._refuse_two_capacities()
        refuse_small_budget(self.name, self.capacity, self.sink, 1 + p.B)
        self._pin_to_sinks()
        self._asked = self.capacity + self.extra_sinks
        self._moving = MovingBase(self.traits.context, self.traits.rotations, self._asked)
        if p.R:  # realigned sinks allow a conversation beyond the context
            self.context_policy = self._moving
        self._fit_context()

    def pin(self, positions: Sequence[int]) -> None:
        super().pin(positions)
        self._fit_context()

    def plan(self, capacity: int) -> Plan:
        g = self.geometry
        peak = self.capacity + self._overflow
        recent = capacity if self.parameters.R == 0 else min(capacity, peak - self.sink)
        kept = self.sink + len(self.pins)
        kept_keys = g.layers * g.kv_heads * (kept + 1) * g.d_k * g.dtype.itemsize
        return Plan([Layout(0, g.layers, self.sink, recent, pinned=len(self.pins))], kept_keys)

    def attach(self, state: KVState) -> None:
        super().attach(state)
        g = self.geometry
        groups: dict[int, tuple[Rotation, list[int]]] = {}
        for layer, rotation in enumerate(self.traits.rotations):
            if rotation is not None:
                groups.setdefault(id(rotation), (rotation, []))[1].append(layer)
        # Each rotation with its layers, on the device, so that no step has to copy them there.
        self._rotated = [(turn, torch.tensor(layers, device=state.device)) for turn, layers in groups.values()]
        self.kept_from = torch.zeros((), dtype=torch.int64, device=state.device)
        self.base = torch.zeros_like(self.kept_from)
        self._last = Last(0, 0, 0)
        self._moving.attach(state, self.base, self._first_kept, self.sink, self.pins)
        # Canonical keys of sinks and pinned messages; the keys of all later tokens are written to an unused last row.
        kept = self.sink + len(self.pins)
        self.kept_keys = torch.zeros((g.layers, g.kv_heads, kept + 1, g.d_k), dtype=g.dtype, device=state.device)
        self._pins = torch.tensor(self.pins, dtype=torch.int64, device=state.device)
        # How many tokens before each of these can be dropped; none before a sink.
        may_drop = self._pins - self.sink - torch.arange(len(self.pins), device=state.device)
        self._before = torch.nn.functional.pad(may_drop, (self.sink, 0))
        self._bases_of_kept = torch.nn.functional.pad(self._moving.bases(self._pins), (self.sink, 0))

    def graph_buffers(self) -> list[Tensor]:
        return [self.kept_from, self.base, self.kept_keys, self._pins, self._before, self._bases_of_kept]

    def prepare_step(self) -> Step:
        total, p = self.state.total, self.parameters
        if not self.context_policy.is_final and self._moving.begins_base(total):
            self._load(self.num_cached() - self.sink)
        kept_from = self._first_kept()
        cached = self.sink + total + 1 - kept_from
        self._last = Last(total, kept_from, cached - self._pruned(cached))
        kind = self._last.dropped, int(total < self.sink)
        return Step(kind, exact=p.R == 0 or total < self.capacity + p.R)

    # ---- the cache

    def fill(self, fresh: bool) -> None:
        length = self.state.total if fresh else self.num_cached()
        self._load(max(0, self._pruned(length) - self.sink))

    def _load(self, recent: int) -> None:
        """Copy the sinks and the last ``recent`` tokens to the slots."""
        (slots,) = self.state.slots
        total, g = self.state.total, self.geometry
        base = self.context_policy.base_of(total)
        if base or int(self.base):
            slots.truncate(0)  # keys in the slots were rotated: load all of them again
        # The slots of pinned messages hold rotated keys: load them again.
        slots.table[..., self.sink : slots.ring] = EMPTY
        self.state.transfer.load_table(slots, self._wanted_table(slots, recent))
        self._last = Last(total, max(self.sink, total - recent), 0)
        self.kept_from.fill_(self._last.kept_from)
        self.base.fill_(base)
        for layer in range(g.layers):
            stored = min(self.sink, total)
            self.kept_keys[layer, :, :stored] = self.state.host.dense(layer, stored)[0]
            if base:
                keys, tokens = slots.keys(layer)[:, slots.ring :], slots.table[0, 0, slots.ring :].long()
                keys.copy_(self._moving.moved(layer, keys, self._moving.bases(tokens) - base))
        self.kept_keys[:, :, self.sink : -1] = slots.kv[:, 0, :, self.sink : slots.ring, : g.d_k]
        self._realign()

    def forward_end(self, position: Tensor) -> None:
        if not self._last.dropped and self._last.at >= self.sink:
            return  # no distance changed
        self.kept_from.add_(self._last.dropped)
        (slots,) = self.state.slots
        recents = slots.table[..., slots.ring :]
        recents.masked_fill_(recents < self.kept_from, EMPTY)
        # Keep the canonical key of a decoded sink, because a conversation may begin with fewer tokens than sinks.
        keys = slots.kv[:, 0, :, :, : self.geometry.d_k].index_select(2, slots.slot_of(position).view(1))
        row = torch.where(position < self.sink, position, self.kept_keys.shape[2] - 1)
        self.kept_keys.index_copy_(2, row.view(1), keys)
        self._realign()

    def report(self) -> ModeReport:
        chosen = {"budget": self.capacity - self.extra_sinks, "sink": self.sink}
        chosen["window"] = self.window - self.parameters.B
        stats = {"cached": self.num_cached(), "dropped": self._first_kept() - self.sink}
        return ModeReport(self.parameters.model_dump() | chosen, stats, TokenState.UNREACHABLE)

    def num_cached(self) -> int:
        """Return how many stored tokens were not dropped."""
        return self.sink + self.state.total - self._first_kept()

    def _first_kept(self) -> int:
        """Return ``kept_from`` as it will be once the device has finished all queued steps."""
        return self._last.kept_from + self._last.dropped * (self.state.total > self._last.at)

    @property
    def _overflow(self) -> int:
        """The most tokens beyond C that a token attends to, without pinned messages."""
        p = self.parameters
        return max(p.R, p.sigma + 1) if p.delta else p.R

    def _fit_context(self) -> None:
        """Keep fewer recent tokens, but at least one, if a token would attend to more than the model's context."""
        self.capacity = self._asked
        if not self.context_policy.is_final:
            room = self.traits.context - self._overflow - len(self.pins)
            self.capacity = min(self._asked, max(self.sink + 1 + self.parameters.B, room))
        self._moving.chunk = self.capacity
        self.window = self.capacity - self.sink

    def _refuse_two_capacities(self) -> None:
        """Refuse a ``budget`` and a window with S + W + B other than the budget, because both set C."""
        p = self.parameters
        if p.window is not None and self.sink + p.window + p.B != self.capacity:
            names, numbers = "sink + window", f"{self.sink} + {p.window}"
            if p.B:
                names, numbers = f"{names} + B", f"{numbers} + {p.B}"
            raise UsageError(
                "The streaming budget contradicts its window.",
                f"budget = {self.capacity} is not {names} = {numbers} = {self.sink + p.window + p.B}.",
                "Set a budget or a window, not both.",
            )

    def _sinks(self) -> int:
        """Return the number of sinks: as given, otherwise the system prompt's length, from 4 up to a quarter of C."""
        if self.parameters.sink is not None:
            return self.parameters.sink
        if self.parameters.window is not None:
            return MIN_SINK
        return max(MIN_SINK, min(self.system_tokens, self.capacity // SINK_SHARE))

    def _pruned(self, length: int) -> int:
        p = self.parameters
        return pruned_length(length, self.capacity, p.R, p.sigma, p.delta)

    def _realign(self) -> None:
        """Rotate sinks and pinned messages to positions directly before the first kept recent token."""
        (slots,) = self.state.slots
        keys = slots.kv[:, 0, :, : slots.ring, : self.geometry.d_k]
        dropped = self._dropped_after()
        for rotation, layers in self._rotated:
            cos, sin = cos_sin(rotation, dropped - self.base)
            canonical = self.kept_keys[:, :, :-1].index_select(0, layers)
            keys.index_copy_(0, layers, rotate(canonical, rotation, cos, sin))

    def _dropped_after(self) -> Tensor:
        """Return for each kept token the number of dropped tokens after it, plus its base: ``[S + P]``.

        The result is 0-d without pinned messages, because it is the same for all sinks.
        """
        if not self.pins:
            return self.kept_from - self.sink
        dropped = self.kept_from - self.sink - (self._pins < self.kept_from).sum()
        return (dropped - self._before).clamp(min=0) + self._bases_of_kept
