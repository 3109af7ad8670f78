"""full: reads every token. The reference for all other modes.

Slot i holds position i in every layer and head, with one table for all. This costs ``Geometry.token_bytes`` of device
memory per token, and nothing moves once the mode is entered. If memory is short, the most recent ``resident`` tokens
stay in a ring of slots, and attention reads all earlier ones from pinned host memory over the link, without a copy.
Device memory then stops growing, the answer is the same, and a step takes as long as the link needs for the rest.
Layers with a window that fits in the ring read nothing over the link.

To use the link while a layer's weights are read, a copy engine stages the first pages of the next layer in a small
buffer, which all layers share in turn. The attention kernel reads the rest before it waits for the staged pages. A step
then takes the longer of both times, not their sum, if the buffer is large enough. Only full-precision pages are staged,
only with the Triton kernels, and only in layers without a window.

A CPU reads its memory faster than most links. So the CPU attends to the last spilled tokens that are not staged, in
place and in parallel with the GPU: to as many as take it as long as the rest takes over the link. A step is then one
CUDA graph per layer, between which the CPU takes its turn. This is done only if it saves more than it costs.

In unified memory (a CPU) there are no slots: attention reads the host pool in place, and K/V are stored once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvchat.config.modes import MIN_BUDGET, FullParameters
from kvchat.kv.attention import PREFILL_WORKSPACE, AttentionSpec, Weights
from kvchat.kv.memory import rates
from kvchat.kv.memory.device_slots import SINKS_OF_GUESS, DeviceSlots, Layout
from kvchat.kv.modes.base import Mode, ModeReport, Plan, Step, everything
from kvchat.kv.modes.drafting import RECENT, Auto, Drafter, Lookup, Window
from kvchat.kv.ops import host_attention
from kvchat.kv.ops.host_attention import HostAttention
from kvchat.kv.prefill import CHUNKS, staging_bytes

# Maximum bytes staged per step over all layers, and maximum share of the slots' bytes for the buffer. Computed: while
# an RTX 3060 reads its memory (29 ms) its link transfers 730 MB; a laptop with 8 GB (24 ms) 290 MB.
STAGED_BYTES, STAGED_SHARE = 768 * 2**20, 1 / 8
LEVELS = 4  # how many different numbers of pages are staged as a conversation grows; each has its own graphs
STARTS = 6  # the CPU's first token moves in steps of 2**-6 of its tokens, because each start has its own graphs


class Full(Mode):
    """One window in all layers, as large as the conversation or the memory; attention reads older tokens from RAM."""

    chooses_by_head: ClassVar = True
    parameters: FullParameters

    def _set_up(self) -> None:
        self.resident = self.parameters.resident
        kinds: dict[str, type[Drafter]] = {"lookup": Lookup, "window": Window, "auto": Auto}
        self.drafter = kinds[self.parameters.draft]() if self.parameters.draft != "off" else None
        self._host_attention: HostAttention | None = None
        self._sink = SINKS_OF_GUESS if isinstance(self.drafter, Window) and not self.geometry.unified else 0

    def pin(self, positions: Sequence[int]) -> None:
        """Do nothing, because everything is read."""

    def plan(self, capacity: int) -> Plan:
        layers = self.geometry.layers
        if self.resident is None or self.resident >= capacity or self.geometry.unified:
            return Plan([replace(everything(self.geometry, layers, capacity), sink=self._sink)])
        slots = Layout(0, layers, self._sink, self.resident, spills=True)
        return Plan([replace(slots, staged=self._staging(slots.nbytes(self.geometry)) // self.geometry.page_bytes)])

    def limit(self, capacity: int, free: int, held: int = 0) -> None:
        if self.parameters.resident is not None or self.geometry.unified:
            return
        # Leave room for the next prefill.
        usable = free - staging_bytes(self.geometry, capacity, CHUNKS[0]) - PREFILL_WORKSPACE
        if self.plan(capacity).device_bytes(self.geometry) > usable:
            usable -= self._staging(int(usable / (1 + STAGED_SHARE)))
            fitting = usable // Layout(0, self.geometry.layers, 0, self.geometry.page).nbytes(self.geometry)
            fits = held or max(MIN_BUDGET, fitting * self.geometry.page)
            self.resident = min(fits, self.resident or fits)  # a ring that has wrapped around cannot grow

    @property
    def spills(self) -> bool:
        """True if tokens are or will be read over the link."""
        return not self.geometry.unified and any(slots.layout.spills for slots in self.state.slots)

    def guess(self, begins: bool) -> None:
        for slots in self.state.slots:
            slots.recent_only = RECENT if begins else 0

    @property
    def guesses(self) -> bool:
        """True if the step's token is a guess, so that it reads nothing over the link."""
        return any(slots.recent_only for slots in self.state.slots)

    def prepare_step(self) -> Step:
        if not self.spills:
            return Step(exact=not self.guesses)
        (slots,) = self.state.slots
        slots.staged = self._stageable(slots)
        slots.on_cpu = on_cpu = self._left_to_cpu(slots)
        if on_cpu:
            slots.staged = min(slots.staged, on_cpu.start // self.geometry.page)
            if self._host_attention is None or self._host_attention.host is not self.state.host:
                self._host_attention = HostAttention(self.state.host)
        # The room is part of the kind, because torch's own operations read as many blocks as there is memory for.
        kind = self.state.host.room, self.guesses, slots.staged, on_cpu.start if on_cpu else -1
        return Step(kind, exact=not self.guesses)

    def forward_begin(self, position: Tensor) -> None:
        super().forward_begin(position)
        for slots in self.state.slots:
            slots.staged_layer = -1  # a failed capture may have left another layer here
        self._stage(-1)

    def attention_begin(self, layer: int, query: Tensor, key: Tensor) -> bool:
        slots, spec, attention = self.state.slots[0], self.state.specs[layer], self._host_attention
        slots.other_part = None
        if slots.on_cpu and attention and spec.window is None:
            attention.ask(query)
            slots.other_part = partial(attention.answer, layer, slots, spec)
        return False

    def attention_end(self, layer: int, query: Tensor, weights: list[Weights], spec: AttentionSpec) -> None:
        self._stage(layer)

    def forward_end(self, position: Tensor) -> None:
        if self.spills and not self.guesses:
            read, fetched = self._pairs(position + 1)
            (slots,) = self.state.slots
            if slots.on_cpu:  # its end moves with the position, but its start is fixed in the graph
                on_cpu = (position + 1 - slots.layout.window - slots.on_cpu.start) * self._heads_reading_all
                slots.read_pairs += on_cpu
                fetched = fetched - on_cpu
            self.state.transfer.count_wanted(read)
            self.state.transfer.count_fetched(fetched)

    def _staging(self, slot_bytes: int) -> int:
        """Return the size in bytes of the staging buffer for slots of ``slot_bytes`` bytes."""
        return int(min(STAGED_BYTES / self.geometry.layers, slot_bytes * STAGED_SHARE))

    def _stageable(self, slots: DeviceSlots) -> int:
        """Return how many pages the next step stages: those entirely outside the ring, as far as there is room."""
        if self.guesses or not self.state.ops.reads_staged:
            return 0
        room = slots.layout.staged
        left = max(0, self.state.total + 1 - slots.layout.window) // self.geometry.page
        unit = max(1, room // LEVELS)
        return min(left, room) // unit * unit

    def _left_to_cpu(self, slots: DeviceSlots) -> range:
        """Return the tokens that the CPU attends to in the next step: the last of those outside the ring.

        The first of them moves by whole ``unit``s, because each value has its own graph.
        """
        end, share, ops = self.state.total + 1 - slots.layout.window, self.parameters.cpu, self.state.ops
        first = self._sink
        if self.guesses or not ops.reads_staged or end <= first or share == 0:
            return range(0)
        if share is not None:
            share = share if host_attention.is_ready(self.geometry.dtype, waits=True) else 0
        elif known := host_attention.measured(self.state.host):
            first = max(first, slots.staged * self.geometry.page)
            nbytes = (end - first) * self._heads_reading_all * self.state.transfer.pair_bytes
            share = rates.share_on_cpu(nbytes, *known, self.geometry.layers)
        tokens = int((end - first) * (share or 0))
        unit = max(self.geometry.page, (1 << tokens.bit_length()) >> STARTS)
        return range(max(first, (end - tokens) // unit * unit) if tokens else end, end)

    @property
    def _heads_reading_all(self) -> int:
        """Total number of KV heads in layers without a window."""
        return self.geometry.kv_heads * sum(spec.window is None for spec in self.state.specs)

    def _stage(self, read: int) -> None:
        """Start staging the next layer without a window if layer ``read`` was the staged one; -1 before the first."""
        (slots,) = self.state.slots
        if not slots.staged or slots.staged_layer != read:
            return
        specs = enumerate(self.state.specs[read + 1 :], read + 1)
        following = next((layer for layer, spec in specs if spec.window is None), None)
        if following is not None:
            self.state.transfer.stage(slots, following)

    def _pairs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many K/V pairs the last of ``tokens`` (0-d) reads, and how many of them come over the link."""
        ring, none = self.state.slots[0].layout.window + self._sink, torch.zeros_like(tokens)
        windows = Counter(spec.window for spec in self.state.specs)
        heads = [(layers * self.geometry.kv_heads, window) for window, layers in windows.items()]
        read = [(n, tokens if window is None else tokens.clamp(max=window)) for n, window in heads]
        return sum((n * seen for n, seen in read), none), sum(
            (n * (seen - ring).clamp(min=0) for n, seen in read), none
        )

    def report(self) -> ModeReport:
        on_host = max(0, self.state.total - self.state.slots[0].layout.window - self._sink) if self.spills else 0
        stats: dict[str, Any] = {}
        if self.spills:
            on_cpu = len(self.state.slots[0].on_cpu)
            stats = {"streamed from RAM": f"{on_host - on_cpu:,} tok", "attended on the CPU": f"{on_cpu:,} tok"}
        if self.drafter:
            stats |= self.drafter.figures()
        return ModeReport(self.parameters.model_dump(), stats, on_host=on_host)
