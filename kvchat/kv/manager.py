"""KVManager: stores a conversation's K/V and attends to it; a mode decides which tokens are read.

A prefill writes to the host pool and attends to everything in it; then the mode fills the slots. A decode step writes
the new token through to the host pool, attends to the slots, and lets the mode fetch tokens for the next step.
``attention`` is the same for all modes, and a decode step reads nothing back from the device.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from kvchat.errors import DoesNotFitError, OutOfMemoryError
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available
from kvchat.kv.memory.host_pool import CachedPrefix
from kvchat.kv.memory.pages import Pages, has_quantized
from kvchat.kv.modes.base import Level, Mode, Step
from kvchat.kv.prefill import Prefill, prefill_over
from kvchat.kv.state import KVState
from kvchat.units import size

# Errors of torch's host allocator, C++, the CUDA driver and its libraries; only their text identifies them.
NO_MEMORY = re.compile(
    r"DefaultCPUAllocator|std::bad_alloc|(CUDA|HIP)( error|\])?: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)
ASKED_FOR = re.compile(r"tried to allocate (\d+) bytes")


class SlotsState(IntEnum):
    """What a refill must repair in the slots before the next step; each state includes the lower ones.

    STALE: prefilled tokens are not in the slots yet. DIRTY: a step or a refill was interrupted, and tables may name
    tokens whose K/V never arrived. MISSING: the slots must be allocated, because memory ran out when the mode was
    entered, or because other tokens were pinned.
    """

    FILLED = 0
    STALE = 1
    DIRTY = 2
    MISSING = 3


class KVManager:
    """Owns the ``state`` of one conversation and the ``mode`` that works on it.

    ``step`` is the result of the mode's last ``prepare_step``. ``effective_params`` are the mode's parameters when it
    was entered, with the values chosen for ``auto``.

    A step is ``begin_step``, one forward of the model between ``forward_begin`` and ``forward_end``, then
    ``commit_step`` or ``rollback_step``. Each chunk of a prefill is ``begin_prefill``, a forward, then
    ``commit_prefill`` or ``rollback_prefill``. The next step fills the slots, unless ``refill`` is called before.
    """

    def __init__(self, geometry: Geometry, device: torch.device, mode: Mode) -> None:
        self.state = KVState(geometry, device, mode.traits.context)
        self._prefill: Prefill | None = None
        self._reread_from: int | None = None
        self._queries: list[Tensor] = []
        self._verified: dict[int, Tensor] | None = None  # the queries of all rows, by layer
        self._fresh = False  # ``fresh`` of the next refill
        self._began_at = 0  # tokens stored before the last step or prefill
        self.mode, self._slots = mode, SlotsState.MISSING
        self.step = Step()
        self.refill(fresh=True)
        self.effective_params = mode.report().params

    @property
    def total(self) -> int:
        return self.state.total

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: slots, tables and the mode's buffers."""
        return self.state.slot_bytes + sum(tensor.nbytes for tensor in self.mode.graph_buffers())

    # ---- a decode step

    def begin_step(self, control: bool = False) -> None:
        """Make room for one token; ``control`` marks a control token of the chat, which modes should keep.

        Raises:
            DoesNotFitError: there is not enough RAM; nothing changed. After any other error call ``rollback_step``.
        """
        self._began_at = self.total
        self._end_prefill()
        if self._slots is not SlotsState.FILLED:
            self.refill()
        self._make_room(self.total + 1)
        self._slots = SlotsState.DIRTY
        self.state.control.index_fill_(0, self.state.position.view(1), control)
        self.step = self.mode.prepare_step()
        self.state.transfer.timer.begin_step(self.step.kind)

    def graph_key(self) -> tuple[object, ...]:
        """Return the CUDA-graph key of this step; steps with equal keys run the same operations on the same buffers."""
        layouts = (slots.layout for slots in self.state.slots)
        buffers = ((t.data_ptr(), t.shape) for t in self.graph_buffers())
        return self.mode, self.step.kind, self.state.transfer.timer.times, *layouts, *buffers

    def graph_buffers(self) -> list[Tensor]:
        return [*self.state.graph_buffers(), *self.mode.graph_buffers()]

    def forward_begin(self) -> None:
        """Begin the step's forward. A CUDA graph can capture everything from here to ``forward_end``."""
        state = self.state
        state.transfer.timer.begin_forward(self.step.kind)
        for slots in state.slots:
            slots.begin_step()
        self._queries = list(state.query)
        state.ops.begin_step(state.position)
        self.mode.forward_begin(state.position)

    def forward_end(self) -> None:
        """End the step's forward: wait for recall, let the mode finish the step, advance the position."""
        state = self.state
        torch.stack(self._queries, out=state.query)  # one kernel for all layers
        state.transfer.join()
        self.mode.forward_end(state.position)
        state.position.add_(1)

    def commit_step(self) -> None:
        self.state.transfer.timer.end_step(self.step.kind)
        self.state.host.total += 1
        self._slots = SlotsState.FILLED
        self.state.steps += 1
        self.state.after_step = True

    def rollback_step(self) -> None:
        """Undo a step that raised, or that another rank did not finish, and refill the slots from the host pool."""
        self.state.transfer.join()
        if self._slots is SlotsState.DIRTY or self.total > self._began_at:
            self._slots = SlotsState.DIRTY
            self._forget(self._began_at)
            self.refill()

    @contextmanager
    def guessing(self) -> Iterator[None]:
        """Let the mode read less in the steps inside; afterwards forget their tokens and their counts."""
        state, total, steps = self.state, self.total, self.state.steps
        read = [(slots, slots.read_pairs.clone()) for slots in state.slots]
        self.mode.guess(True)
        try:
            yield
        finally:
            self.mode.guess(False)
            state.steps = steps
            if self.total > total:
                self.truncate(total)  # first: the next lines may run out of memory, and nothing else forgets them
            for slots, pairs in read:
                slots.read_pairs.copy_(pairs)

    # ---- a prefill

    def begin_prefill(self, tokens: int, verifies: bool = False) -> None:
        """Make room for a forward of ``tokens`` new tokens; if it ``verifies`` a draft, ``end_at`` can end it early.

        Raises:
            DoesNotFitError: there is not enough RAM; nothing changed.
        """
        self._began_at = self.total
        self.state.reserve(self.total + tokens)
        self.step, self._verified = Step(), {} if verifies else None
        if self.mode.context_policy.limits_prompt(self.total + tokens):
            self.refill()
        self._slots = max(self._slots, SlotsState.STALE)
        self._prefill = prefill_over(
            self.state.host, tokens, self.mode.context_policy.begin_prompt(self.total + tokens)
        )

    def commit_prefill(self, tokens: int, control: Sequence[int] = ()) -> None:
        """Count the forward's ``tokens`` as stored; ``control`` has the offsets of the chat's control tokens."""
        self._end_prefill()
        if control:
            self.state.control[self.total + torch.tensor(control, device=self.state.device)] = True
        self.state.prompt.commit(self.total, tokens)
        self.state.host.total += tokens
        self.state.after_step = False

    def end_at(self, row: int) -> None:
        """Make ``row`` of a verifying forward its last token; modes then choose tokens by this row's queries."""
        for layer, queries in (self._verified or {}).items():
            self.state.query[layer].copy_(queries[:, row])

    def rollback_prefill(self) -> None:
        """Undo a forward that raised, or that another rank did not finish; none of its tokens are stored."""
        self._end_prefill()
        self.state.prompt.discard()
        if self.total > self._began_at:
            self._forget(self._began_at)

    @contextmanager
    def rereading(self, start: int) -> Iterator[None]:
        """Let a forward of the stored tokens from position ``start`` on rebuild the state of layers without K/V.

        It attends to the stored K/V without any approximation and does not change them.
        """
        self._end_prefill()
        self._reread_from = start
        try:
            yield
        finally:
            self._reread_from = None

    def _end_prefill(self) -> None:
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill.close()

    def refill(self, fresh: bool = False) -> None:
        """Let the mode fill its slots for the next token.

        Args:
            fresh: the mode may read all stored tokens again, also those that it had dropped for good.
        """
        state = self.state
        if self._slots is SlotsState.MISSING:
            self._allocate()
        elif self._slots is SlotsState.DIRTY:
            for slots in state.slots:
                slots.truncate(0)
        self._slots, self._fresh = SlotsState.DIRTY, fresh or self._fresh
        state.position.fill_(self.total)
        self._make_room(self.total + 1)
        self.mode.fill(self._fresh)
        for slots in state.slots:
            slots.attended.copy_(slots.table)
        self._slots, self._fresh = SlotsState.FILLED, False

    # ---- modes

    def check_switch(self, mode: Mode, link_bytes_per_s: float | None = None) -> available.SwitchCost:
        """Return what entering ``mode`` would cost now; ``link_bytes_per_s`` is used until a fill has been timed.

        Raises:
            DoesNotFitError: its slots do not fit on the device.
        """
        state = self.state
        capacity = state.geometry.grown(self.total + 1)
        mode.pin(state.pins)
        self._limit(mode, capacity, released=self.device_bytes)
        plan = mode.plan(capacity)
        needed = plan.device_bytes(state.geometry)
        available.check_fits(mode.name, needed, capacity, state.device, self.device_bytes)
        moved = plan.moved_bytes(state.geometry, self.total)
        rate = state.transfer.fill_rate or link_bytes_per_s
        return available.SwitchCost(moved, needed, moved / rate if rate else None)

    def switch(self, mode: Mode) -> int:
        """Enter ``mode`` and return the bytes moved to the device. Stored K/V do not change.

        If memory runs out nevertheless, the old mode is re-entered, at the latest before the next step.

        Raises:
            DoesNotFitError: there is no room for its slots; the old mode stays.
        """
        self.check_switch(mode)
        before, old = self.state.transfer.moved_bytes(), self.mode
        try:
            self.mode, self._slots = mode, SlotsState.MISSING
            self.refill(fresh=True)
            moved, self.effective_params = self.state.transfer.moved_bytes() - before, mode.report().params
            return moved
        except BaseException:
            self.go_back(old)
            raise

    def go_back(self, mode: Mode) -> None:
        """Re-enter ``mode`` after another could not be entered."""
        self.mode, self._slots = mode, SlotsState.MISSING
        with suppress(Exception):  # the switch's own error matters more; the next step tries again
            self.state.release_slots()
            self.refill(fresh=True)

    def recover(self, level: Level) -> None:
        """Let the mode read more for a while, because the generated text may have gone wrong."""
        # If memory runs out inside, the next step refills the slots first.
        before, self._slots = self._slots, max(self._slots, SlotsState.STALE)
        self.mode.recover(level)
        self._slots = before

    def pin(self, positions: Sequence[int]) -> None:
        """Attend to the stored tokens at ``positions`` in every mode and step; they replace the earlier pins.

        Raises:
            DoesNotFitError: there is no room for their slots; the earlier pins stay.
        """
        before = self.state.pins
        self._set_pins(tuple(sorted(set(positions))))
        try:
            if self._slots is SlotsState.MISSING:
                self.check_switch(self.mode)
                self.refill(fresh=True)
        except BaseException:
            self._set_pins(before)
            raise

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens``; if filling the slots fails, the next step fills them first."""
        try:
            self._forget(tokens)
            self.refill(fresh=True)
        except BaseException:
            self._slots, self._fresh = max(self._slots, SlotsState.DIRTY), True
            raise

    def checkpoint(self, start: int) -> Checkpoint:
        return take_checkpoint(self.state, start)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the tokens of ``checkpoint``; the mode fills its slots at the next switch or step."""
        self._end_prefill()
        self._slots, self._fresh = max(self._slots, SlotsState.DIRTY), True
        restore(self.state, checkpoint)
        self._set_pins(checkpoint.pins)

    def adopt(self, prefix: CachedPrefix) -> int:
        """Replace the stored tokens by those of ``prefix``; return how many could be read.

        Raises:
            DoesNotFitError: there is not enough memory. After this or an error of ``prefix.read`` nothing is stored.
        """
        self.truncate(0)
        try:
            self.state.adopt(prefix)
            self.refill(fresh=True)
        except BaseException:
            self._forget(0)
            self._slots, self._fresh = max(self._slots, SlotsState.DIRTY), True
            raise
        return self.total

    def quantize_pages(self, quantizes: bool) -> None:
        self.state.quantize_pages(quantizes)

    # ---- called by the model's layers and their attention

    @property
    def decodes(self) -> bool:
        """True in a decode step, when layers may call ``attend_token``."""
        return self._prefill is None and self._reread_from is None

    @property
    def wants_ahead(self) -> bool:
        """True if layers should call ``estimated`` in this forward."""
        return self.decodes and self.mode.wants_ahead

    def estimated(self, layer: int, query: Tensor) -> None:
        """Let the mode choose tokens for ``layer`` by its estimated ``query [H_q, 1, d_k]``, before layer - 1 runs."""
        self.mode.estimated(layer, query[:, 0])

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Store ``key [H, n, d_k]``, ``value [H, n, d_v]``; attend with ``query [H_q, n, d_k]``: ``[H_q, n, d_v]``."""
        if self.decodes:
            return self.attend_token(layer, query[:, 0], key[:, 0], value[:, 0], spec).unsqueeze(1)
        self.state.note_spec(layer, spec)
        if self._reread_from is not None:
            keys, values = self.state.host.dense(layer, self._reread_from + query.shape[1])
            keys = self.mode.context_policy.unbased(layer, keys)
            return self.state.ops.attend_new(query, keys, values, self._reread_from, spec)
        assert self._prefill is not None
        self.state.query[layer].copy_(query[:, -1])
        if self._verified is None:
            self.state.prompt.note(layer, query)
        else:
            self._verified[layer] = query
        keys, values = self._prefill.extended(layer, key, value)
        self.mode.prefilled(layer, self.total, keys, values)
        keys, values = self.mode.context_policy.limited(layer, keys, values)
        return self.state.ops.attend_new(query, keys, values, keys.shape[1] - query.shape[1], spec)

    def attend_token(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """``attention`` for one decoded token: ``query [H_q, d_k]``, ``key [H, d_k]``, ``value [H, d_v]``."""
        self.state.note_spec(layer, spec)
        ops, held = self.state.ops, self.state.slots_of[layer]
        ops.append(held, layer, key, value)
        needs_weights = self.mode.attention_begin(layer, query, key)
        parts = [ops.attend(slots, layer, query, spec, needs_weights) for slots in held]
        self._queries[layer] = query
        self.mode.attention_end(layer, query, [weights for _, weights in parts if weights], spec)
        attended = parts[0][0]
        if len(parts) > 1:  # each has some of the heads, ``[H, G, d_v]``
            attended = torch.cat([part for part, _ in parts])
            attended = attended.index_select(0, self.state.head_orders[layer])
        return attended.flatten(0, 1)

    # ---- inside

    def _allocate(self) -> None:
        """Allocate the mode's slots; if memory runs out, the next refill tries again."""
        capacity = self.state.geometry.grown(self.total + 1)
        self._limit(self.mode, capacity, released=self.state.slot_bytes)
        self.state.allocate(self.mode.plan(capacity).layouts, capacity)
        self.mode.attach(self.state)

    def _forget(self, tokens: int) -> None:
        self._set_pins(tuple(position for position in self.state.pins if position < tokens))
        self.state.truncate(tokens)

    def _set_pins(self, pins: tuple[int, ...]) -> None:
        before, self.state.pins = self.mode.pins, pins
        self.mode.pin(pins)
        if self.mode.pins != before:
            self._slots = SlotsState.MISSING

    def _make_room(self, tokens: int) -> None:
        """Grow the host pool, and the slots if they hold every token."""
        self.state.reserve(tokens)
        if tokens > self.state.capacity:
            capacity = self.state.geometry.grown(tokens)
            self._limit(self.mode, capacity, held=self.state.capacity)
            self.state.resize(self.mode.plan(capacity).layouts, capacity)

    def _limit(self, mode: Mode, capacity: int, released: int = 0, held: int = 0) -> None:
        """Tell a mode how much memory it may use for ``capacity`` tokens once ``released`` bytes are freed."""
        mode.limit(capacity, available.usable(available.free_bytes(self.state.device) + released), held)


@dataclass(frozen=True)
class Checkpoint:
    """A copy of the tokens from ``start`` to ``total``, in whole ``pages`` from the page of ``start`` on.

    ``control`` marks the chat's control tokens; ``pins``, ``query``, ``prompt`` and ``after_step`` are the state's.
    """

    start: int
    total: int
    pages: Pages
    control: Tensor
    pins: tuple[int, ...]
    query: Tensor
    prompt: tuple[Tensor, range]
    after_step: bool


@torch.inference_mode()
def take_checkpoint(state: KVState, start: int) -> Checkpoint:
    """Copy the tokens from ``start`` on.

    Raises:
        DoesNotFitError: there is not enough RAM for a copy.
    """
    quantized = state.host.quantized[start // state.geometry.page :]
    needed, free = sum(map(state.host.page_bytes, quantized)), available.usable(available.host_free())
    if needed > free:
        raise DoesNotFitError(
            "There is not enough RAM for a copy of the conversation.",
            f"K/V of {state.total - start:,} tokens take {size(needed, 2)}; {size(free, 2)} are free.",
            "Free memory, or use a shorter conversation; nothing changed.",
        )
    state.host.synchronize()
    pages = state.host.copied(start // state.geometry.page)
    control, query = state.control[start : state.total].clone(), state.query.clone()
    return Checkpoint(start, state.total, pages, control, state.pins, query, state.prompt.copied(), state.after_step)


@torch.inference_mode()
def restore(state: KVState, checkpoint: Checkpoint) -> None:
    """Replace the tokens after the first ``checkpoint.start`` ones by those of ``checkpoint``.

    Those first tokens must not have changed. The slots are not updated; the caller must refill them.
    """
    state.host.synchronize()
    state.prepare_quantized(has_quantized(checkpoint.pages))
    state.host.put(checkpoint.start // state.geometry.page, checkpoint.pages)
    state.host.total = checkpoint.total
    state.control[checkpoint.start :] = False
    state.control[checkpoint.start : checkpoint.total] = checkpoint.control
    state.query.copy_(checkpoint.query)
    state.prompt.restore(*checkpoint.prompt)
    state.after_step = checkpoint.after_step


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that device or host memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(NO_MEMORY.search(str(error)))


@contextmanager
def explained(kv: KVManager, doing: str) -> Iterator[None]:
    """Turn out-of-memory errors inside into one that explains itself; ``doing`` completes "Memory ran out while".

    Raises:
        OutOfMemoryError: instead of the errors of Python, the system and torch; stored tokens are kept.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        where, held = f"on {kv.state.device}", kv.device_bytes
        if kv.state.device.type == "cpu":  # all K/V are in the host pool
            where, held = "in RAM", kv.state.host.nbytes
        shortage = (str(error).splitlines() or ["no more memory"])[0]
        if asked := ASKED_FOR.search(str(error)):
            shortage = f"tried to allocate {size(int(asked[1]), 2)} more."
        raise OutOfMemoryError(
            f"Memory ran out while {doing}.",
            f"The {kv.mode.name} mode holds {size(held, 2)} of K/V {where} for {kv.total:,} stored tokens: {shortage}",
            "Your conversation is safe. Try a smaller budget or the streaming mode.",
        ) from error
