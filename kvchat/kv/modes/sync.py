"""sync: a few representative heads keep and read everything, and choose tokens for the heads that resemble them.

Paper: SyncKV (sections 4.1-4.4, algorithm 1). In each layer the KV heads are clustered (``sync_heads``). The
representative of a cluster keeps all K/V on the device; its followers keep k tokens, static and dynamic ones. Static
tokens, for the whole turn, are the rho * k that get the most attention from the representative at the last prompt
position. At every m-th step, its attention chooses the dynamic tokens for the following steps (anticipation); in all
other steps nothing is chosen and nothing moves (suspension).

Departures and decisions:
    * Followers also keep a ring of recent tokens, which the paper does not mention but new tokens need. A token leaves
      it only at an anticipation, which can choose it: the ring has w = 128 tokens after an anticipation (fewer if a
      small budget leaves less than twice as much) and w + m - 1 before the next.
    * The first 4 tokens are always static and count as such (not with ``profile=paper``).
    * k follows from ``budget``, otherwise from ``mem`` and the number of stored tokens when decoding begins in a turn.
      The paper's Mem% counts k tokens per follower and all tokens of representatives, which fits the rows of its tables
      except Llama-70B's at 20 %. Here it counts all allocated memory, including ring and double buffer. It is 50 %, or
      more if followers would keep less than a third of the tokens (as with 2 KV heads). ``profile=paper`` counts like
      the paper, so more is allocated, and refuses 50 % if representatives alone take that much.
    * Each follower gets the tokens of its own cluster (equation 7; algorithm 1, line 23, joins all clusters' sets).
    * Representatives are the best retrieval heads of their clusters; with ``profile=paper``, the heads nearest to the
      centroids, as in the paper.
    * Representatives read everything. With an index they could read less, but then every head could: this is
      speculative mode, which is closer to full on SmolLM2 and reads half as much as sync (``bench/README.md``).
    * Clusters come from 24 generated texts of 512 tokens that hide a fact (the paper: 50 articles of 1,000);
      ``kvchat calibrate`` accepts another text. With another text, the paper's rule chooses another representative in
      half of the bundled model's layers, and the retrieval rule in none.
    * Scores are maxima over the query heads of a group, as in the calibration.
    * Fetched tokens go to unread slots, as many as there are dynamic tokens: the paper's double buffer, without copying
      tokens that stay. If fewer static tokens exist than their share, there are more dynamic ones; those without a free
      slot wait for the next anticipation.

``profile=paper`` keeps the departures that do not mention it. On the sets by cluster the paper contradicts itself.

Without a calibration, with one KV head, or if all heads are representatives, it works like full mode, and says so.

Shapes: representatives share one table, slot = position; followers' tables ``[H - N_r, region + 4 + w + m - 1]``.
Costs: an anticipation ranks all tokens once per cluster; other steps only cost what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from kvchat.config.modes import MIN_BUDGET, SyncParameters
from kvchat.errors import DoesNotFitError
from kvchat.kv.attention import AttentionSpec, Weights, attend, products
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.modes.base import Mode, ModeReport, Plan, Step, everything, refuse_small_budget
from kvchat.kv.modes.sync_heads import default_clusters, roles
from kvchat.kv.ops.selection import assign_slots, mask_of
from kvchat.kv.state import KVState

SINK = 4
RING = 128
MEM = 0.5  # share of full's K/V, as in the paper
FOLLOWER_PART = 3  # a follower keeps at least one token in 3 if mem is not given


class Sync(Mode):
    """Representative heads hold everything; followers hold sinks, a ring, static and dynamic tokens."""

    parameters: SyncParameters

    def _set_up(self) -> None:
        self._sinks = 0 if self.parameters.profile == "paper" else SINK
        heads, calibration = self.geometry.kv_heads, self.traits.calibration
        measured = calibration.clusters if calibration else default_clusters(heads)
        self.clusters = min(heads, self.parameters.clusters or measured)
        recent = self._recent()
        self.ring = recent + self.parameters.m - 1
        followers = heads - self.clusters
        self.mem = self.parameters.mem or max(MEM, (self.clusters + followers / FOLLOWER_PART) / heads)
        self.k = 0
        self.split = False
        if not followers:
            return
        if self.parameters.budget is not None:
            refuse_small_budget(self.name, self.parameters.budget, self._sinks, self.ring, " (window is w + m - 1)")
        else:
            refuse_small_mem(self.mem, heads, self.clusters)
        if calibration is not None:
            self.split = True
            self.sink, self.window = self._sinks, recent
            self._pin_to_sinks()
            self.roles = roles(calibration, self.clusters, self.parameters.representatives)
        self.needs_calibration = not self.split

    # ---- slots

    def pin(self, positions: Sequence[int]) -> None:
        if self.split:
            super().pin(positions)

    def plan(self, capacity: int) -> Plan:
        layers = self.geometry.layers
        if not self.split:
            return Plan([everything(self.geometry, layers, capacity, in_slots=self.needs_calibration)])
        held_bytes = layers * self.clusters * self._width(self._most(capacity)) * torch.int64.itemsize
        heads = tuple(r.representatives for r in self.roles)
        representatives = Layout(0, layers, sink=0, window=capacity, heads=heads)
        return Plan([representatives, self._followers(capacity)], held_bytes)

    def _followers(self, capacity: int) -> Layout:
        layers, heads = self.geometry.layers, tuple(r.followers for r in self.roles)
        if not self.parameters.offload:
            return Layout(0, layers, 0, capacity, shared=False, heads=heads)
        pages = self.geometry.pages(self._region(self._most(capacity)))
        ring, pinned = min(self.ring, capacity), len(self.pins)
        return Layout(0, layers, self.sink, ring, pages, shared=False, heads=heads, pinned=pinned)

    def k_of(self, tokens: int) -> int:
        """Return k, a follower's static and dynamic tokens with sinks, in a turn that begins with ``tokens``."""
        p = self.parameters
        if p.budget is not None:
            k = p.budget - self.ring
        else:
            per_follower = paper_k(self.mem, tokens, self.geometry.kv_heads, self.clusters)
            if p.profile == "default":  # two pages less, because the region and a head's slots are rounded up to pages
                per_follower = (per_follower - self.ring - 2 * self.geometry.page) / (2 - p.rho)
            k = max(MIN_BUDGET, int(per_follower))
        return max(self._sinks, k)

    def _most(self, capacity: int) -> int:
        """Return the highest k of a turn with room for ``capacity`` tokens; at most the tokens outside the ring."""
        return max(self._sinks, min(self.k_of(capacity), capacity + 1 - self._recent()))

    def attach(self, state: KVState) -> None:
        super().attach(state)
        self.anticipations = 0
        if self.split:
            self.overlap = torch.zeros(2, dtype=torch.int64, device=state.device)
            follows = [[*r.follows] for r in self.roles]
            self._follows = torch.tensor(follows, device=state.device)
            self.held = torch.empty((self.geometry.layers, self.clusters, 0), dtype=torch.int64, device=state.device)

    def graph_buffers(self) -> list[Tensor]:
        return [*super().graph_buffers(), self.held, self.overlap] if self.split else []

    # ---- a new turn

    def fill(self, fresh: bool) -> None:
        """Choose static and dynamic tokens by the representatives' attention at the last stored position."""
        if not self.split:
            return super().fill(fresh)
        state, (everything, rest) = self.state, self.state.slots
        state.transfer.load_table(everything, self._wanted_table(everything, everything.layout.window))
        last = torch.tensor(state.total - self.window, device=state.device)
        chosen_anyway = sum(position <= state.total - self.window for position in self.pins)
        candidates = max(0, state.total + 1 - self.window - self.sink - chosen_anyway)
        self.t = 0
        self.k = self.k_of(state.total)
        self.static = min(self.k - self._sinks - self._dynamic_share(self.k), candidates)
        self.held = self.held.new_empty((self.geometry.layers, self.clusters, 0))
        self._widen_held()
        if candidates:
            for layer in range(len(self.held)):
                room = min(self.k - self._sinks, self.held.shape[2])
                chosen = self._best(self._rank(layer, self._last_weights(layer).amax(1), last), room)
                self.held[layer, :, : chosen.shape[1]] = chosen
        self._load(rest, last)
        return None

    def _load(self, rest: DeviceSlots, last: Tensor) -> None:
        """Load the followers' tokens into their slots."""
        if self.parameters.offload:
            table = self._wanted_table(rest, self.window - 1)
            for layer in range(self.geometry.layers):
                table[layer, :, : self.held.shape[2]] = self.held[layer][self._follows[layer]].to(torch.int32)
            self.state.transfer.load_table(rest, table)
            return
        self.state.transfer.load_table(rest, self._wanted_table(rest, rest.layout.window))
        for layer in range(self.geometry.layers):
            self._open(rest, layer, last)

    def _last_weights(self, layer: int) -> Tensor:
        """Return the representatives' attention weights of the last stored token, ``[N_r, G, n]``."""
        g, state, (everything, _) = self.geometry, self.state, self.state.slots
        spec = state.specs[layer]
        query = everything.pick(layer, state.query[layer].view(g.kv_heads, g.group, g.d_k), 0)
        sinks = None if spec.sinks is None else everything.pick(layer, spec.sinks.view(g.kv_heads, g.group), 0)
        table = everything.table_of(layer)
        masked = table < spec.first_seen(state.total)
        bias = torch.zeros(table.shape, dtype=g.dtype, device=table.device).masked_fill_(masked, float("-inf"))
        held = products(everything.keys(layer), everything.values(layer))
        return attend(query, held, bias.unsqueeze(1), spec, sinks)[1]

    # ---- a step

    def prepare_step(self) -> Step:
        if not self.split:
            return Step()
        self.t += 1
        self.anticipations += self.anticipates
        self._widen_held()
        return Step((int(self.anticipates), self.static), self._reads_all(self.state.total + 1))

    def _widen_held(self) -> None:
        """Make room for k in ``held``; the slots have less room only while they hold every token."""
        width = self._width(self.k)
        width = min(width, self.state.slots[1].offset) if self.parameters.offload else width
        if width > self.held.shape[2]:
            self.held = torch.nn.functional.pad(self.held, (0, width - self.held.shape[2]), value=EMPTY)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        self._before = self.held[:, :, self.static :].clone() if self._chooses else None

    def forward_end(self, position: Tensor) -> None:
        if self._before is not None:
            placed = self.held[:, :, self.static :]
            chosen = placed >= 0
            self.overlap.add_(torch.stack((((placed == self._before) & chosen).sum(), chosen.sum())))

    @property
    def _chooses(self) -> bool:
        return self.split and self.held.shape[2] > 0 and self.anticipates

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        return self._chooses

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        # This layer's attention is done, so changes take effect in the next step.
        if weights:
            best = weights[0].best()
            with self.state.transfer.side_stream(layer)(best):
                self._anticipate(layer, best)

    def _anticipate(self, layer: int, best: Tensor) -> None:
        """Choose and fetch the dynamic tokens by ``best [N_r, n]``, the representatives' weights."""
        last = self.state.position + 1 - self.window
        ranked = self._rank(layer, best, last)
        ranked.scatter_(1, self.held[layer, :, : self.static].clamp(min=0), -1.0)
        before = self.held[layer, :, self.static :]
        wanted = self._best(ranked, min(self.k - self._sinks - self.static, before.shape[1]))
        placed = assign_slots(wanted, before, ranked.shape[1])
        if self.parameters.offload:
            follows = self._follows[layer]
            self.state.transfer.load_tokens(self.state.slots[1], layer, self.static, placed[follows], before[follows])
        before.copy_(placed)
        self._open(self.state.slots[1], layer, last)

    @property
    def anticipates(self) -> bool:
        """True if the current step chooses; steps are counted from 1 after the slots were filled."""
        return self.t % self.parameters.m == 0

    # ---- choosing

    def _rank(self, layer: int, best: Tensor, last: Tensor) -> Tensor:
        """Return ``best [N_r, n]``, with -1 for sinks, pinned tokens, tokens after ``last`` and those out of sight."""
        spec = self.state.specs[layer]
        tokens = torch.arange(best.shape[1], device=best.device)
        masked = (tokens < self.sink) | (tokens > last)
        if self.pins:
            masked |= self._is_pinned(tokens)
        if spec.window is not None:
            masked |= tokens <= last + self.window - spec.window
        return best.masked_fill(masked, -1.0)

    def _best(self, ranked: Tensor, k: int) -> Tensor:
        """Return the ``k`` highest of ``ranked [N_r, n]``, best first, or EMPTY if there are fewer: ``[N_r, <= k]``."""
        best, chosen = ranked.topk(min(k, ranked.shape[1]), -1)
        return chosen.masked_fill(best < 0, EMPTY)

    def _open(self, rest: DeviceSlots, layer: int, last: Tensor) -> None:
        """Let the followers' attention read their tokens, the sinks, and all tokens after ``last``."""
        table, held = rest.table_of(layer), self.held[layer][self._follows[layer]]
        if self.parameters.offload:
            table[:, : held.shape[1]] = held.to(torch.int32)
            ring = table[:, rest.ring :]
            ring.masked_fill_(ring <= last, EMPTY)
            return
        tokens = torch.arange(rest.n, device=table.device)
        inside = (tokens < self.sink) | (tokens > last)
        if self.pins:
            inside |= self._is_pinned(tokens)
        end = last + self.window
        table.copy_(torch.where((inside | mask_of(held, rest.n)) & (tokens < end), tokens, EMPTY))

    # ---- for the interface

    def report(self) -> ModeReport:
        mem = {"mem": self.mem} if self.parameters.budget is None else {}
        params = self.parameters.model_dump() | {"clusters": self.clusters} | mem
        if not self.split:
            as_full = f"all {self.geometry.kv_heads}: as full ({self._why_full()})"
            return ModeReport(params, {"representative heads": as_full})
        kept, chosen = self.overlap.tolist()
        stats = {
            "representative heads": " ".join("+".join(map(str, r.representatives)) for r in self.roles),
            "measured on": self.traits.calibration.measured_on if self.traits.calibration else "",
            "k": self.k,
            "recent": self.window,
            "of full's memory": f"{self._memory_share():.0%}",
            "anticipation steps": self.anticipations,
            "set overlap": f"{kept / chosen:.0%}" if chosen else "n/a",
        }
        return ModeReport(params, stats, badges=self._badges())

    def _reads_all(self, tokens: int) -> bool:
        """Return whether the token decoded as number ``tokens`` reads all earlier tokens."""
        return tokens - self.window <= self.k

    def _badges(self) -> tuple[str, ...]:
        """Return a warning if fewer tokens are read but no memory is saved."""
        if self._reads_all(self.state.total) or (share := self._memory_share()) < 1:
            return ()
        why = "a smaller budget" if self.parameters.offload else "offload=true"
        return (f"sync saves no memory: its K/V take {share:.0%} of full's on the device; {why} would save some",)

    def _memory_share(self) -> float:
        """Return the K/V on the device as a fraction of full's; above 1 if followers keep nearly everything."""
        held, g = self.state.slots, self.geometry
        full = g.layers * g.kv_heads * sum(slots.n for slots in held[:1]) * 2 * g.row_bytes
        return sum(slots.kv.nbytes for slots in held) / full if full else 0.0

    def _dynamic_share(self, k: int) -> int:
        """Return floor((1 - rho) * k), exactly for rho as a decimal fraction."""
        return min(k - self._sinks, int((1 - Fraction(str(self.parameters.rho))) * k))

    def _region(self, k: int) -> int:
        """Return the slots for static and, twice, for dynamic tokens."""
        return k - self._sinks + self._dynamic_share(k)

    def _width(self, k: int) -> int:
        """Return ``_region`` in whole pages."""
        return self.geometry.round_up(self._region(k))

    def _recent(self) -> int:
        """Return the size of the ring after an anticipation: at most half of what a small budget allows."""
        p = self.parameters
        return RING if p.budget is None else max(1, min(RING, (p.budget - self._sinks) // 2 - (p.m - 1)))

    def _why_full(self) -> str:
        if self.geometry.kv_heads == 1:
            return "the model has one"
        return "calibrated on the first long prompt" if self.needs_calibration else "one cluster per head"


def paper_k(mem: float, tokens: int, kv_heads: int, representatives: int) -> float:
    """Return the tokens per follower if ``mem`` of a full cache holds exactly these and those of the representatives.

    This fits the rows of the paper's tables, except Llama-70B's at 20 %. ``Sync.k_of`` deducts other allocated memory.

    Raises:
        DoesNotFitError: the representatives alone take that much.
    """
    refuse_small_mem(mem, kv_heads, representatives)
    return tokens * (mem * kv_heads - representatives) / (kv_heads - representatives)


def refuse_small_mem(mem: float, kv_heads: int, representatives: int) -> None:
    """Refuse a share of memory that is too small for the representatives alone."""
    floor = representatives / kv_heads
    if mem <= floor:
        raise DoesNotFitError(
            f"Sync mode cannot keep only {mem:.0%} of the K/V.",
            f"{representatives} of {kv_heads} KV heads keep everything, which already takes {floor:.0%}.",
            f"Use mem over {floor:.2f}, or fewer clusters.",
        )
