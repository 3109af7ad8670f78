"""The store: host pool, slots and the mode at hand; what the model's attention calls.

A prefill writes to the host pool and attends to everything in it; then the mode fills the slots. A decode step writes
the new token through to the host pool, attends to the slots, and lets the mode fetch what the next step wants. Nothing
in ``attention`` depends on the mode's name, and a decode step reads nothing back from the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvchat.errors import DoesNotFitError
from kvchat.kv.attention import attend_prefill
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import budget
from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.prefill_staging import Prefill, prefill_over
from kvchat.kv.modes.base import Mode
from kvchat.kv.ops.torch_ops import choose_ops
from kvchat.kv.transfer import Transfer
from kvchat.protocol.messages import Price


class Store:
    """K/V of one conversation.

    ``total`` tokens are stored; ``position`` (0-d int64, on the device) is the position of the token being decoded,
    equal to ``total`` between steps; ``query [layers, H_q, d_k]`` are the last token's queries; ``pinned [reserved]``
    (bool) marks tokens that no mode should leave out if it has the choice: the chat's control tokens. What
    grows with the conversation has room for ``capacity`` tokens.
    """

    def __init__(self, geometry: Geometry, device: torch.device, mode: Mode) -> None:
        g = geometry
        self.geometry = g
        self.device = device
        self.host = HostPool(g, device, mode.traits.context)
        self.ops = choose_ops(g, self.host, device)
        self.transfer = Transfer(g, self.ops, device)
        self.query = torch.zeros((g.layers, g.q_heads, g.d_k), dtype=g.dtype, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.pinned = torch.zeros(self.host.reserved, dtype=torch.bool, device=device)
        self.specs: list[AttentionSpec | None] = [None] * g.layers
        self.slots: list[DeviceSlots] = []
        self.steps = 0
        self._active_before = 0
        self._prefill: Prefill | None = None
        self._decoded_last = False
        # A step or a filling was cut short: tables may name tokens whose K/V never came.
        self._torn = False
        self.mode = mode
        self._enter(mode)

    @property
    def total(self) -> int:
        """Tokens stored."""
        return self.host.total

    # ---- what the session calls between forwards

    @contextmanager
    def prefill(self, tokens: int, pinned: Sequence[int] = ()) -> Iterator[None]:
        """A forward of ``tokens`` new tokens runs inside; they are stored when it returns. Some may be ``pinned``.

        Raises:
            DoesNotFitError: the host has no memory for them. If the forward raises, nothing new is stored.
        """
        self._reserve(self.total + tokens)
        self._prefill = prefill = prefill_over(self.host, tokens)
        try:
            yield
        finally:
            self._prefill = None
            prefill.close()
        if pinned:
            self.pinned[self.total + torch.tensor(pinned, device=self.device)] = True
        self.host.total += tokens
        self._decoded_last = False

    @contextmanager
    def step(self, pinned: bool = False) -> Iterator[None]:
        """A step of one token runs inside, in the mode at hand (``layers`` or its graph); then the token is stored."""
        if self._torn:
            self.settle()
        self._make_room(self.total + 1)
        self._torn = True
        try:
            self.pinned.index_fill_(0, self.position.view(1), pinned)
            self.mode.advance()
            yield
            self.transfer.end_step()
        except BaseException:
            self.transfer.side_stream.join()
            self.truncate(self.total, self.mode.num_reachable())
            raise
        self.host.total += 1
        self._torn = False
        self.steps += 1
        self._decoded_last = True

    @contextmanager
    def layers(self) -> Iterator[None]:
        """The model's forward of the step's token runs inside. It is all work for the device: a graph can hold it."""
        for slots in self.slots:
            slots.begin_step()
        self._queries = list(self.query)
        self.ops.begin_step(self.position)
        self.mode.forward_begin(self.position)
        yield
        torch.stack(self._queries, out=self.query)  # one kernel for all layers
        self.transfer.side_stream.join()
        self.mode.forward_end(self.position)
        self.position.add_(1)

    def settle(self, num_reachable: int | None = None) -> None:
        """After a prefill (or an aborted step): the mode fills its slots for the next token.

        ``num_reachable`` tokens could be read before, with those just prefilled; all, where not given. After a step
        that was cut short everything in the slots comes anew from the host pool.
        """
        if self._torn:
            for slots in self.slots:
                slots.truncate(0)
        self._torn = True
        self.position.fill_(self.total)
        self._make_room(self.total + 1)
        self.mode.fill(self.total if num_reachable is None else num_reachable)
        for slots in self.slots:
            slots.attended.copy_(slots.table)
        self._torn = False

    def switch(self, mode: Mode) -> int:
        """Enter ``mode``; returns the bytes moved to the device. What is stored stays as it is, byte for byte.

        Raises:
            DoesNotFitError: there is no room for its slots; the old mode goes on.
        """
        budget.check(mode, self.geometry.grown(self.total), self.device, self.device_bytes)
        before, old = self.transfer.moved_bytes(), self.mode
        try:
            self._enter(mode)
        except Exception:
            self._enter(old)
            raise
        return self.transfer.moved_bytes() - before

    def price(self, mode: Mode) -> Price:
        """What entering ``mode`` would cost now."""
        try:
            budget.check(mode, self.geometry.grown(self.total), self.device, self.device_bytes)
        except DoesNotFitError as error:
            return Price(mode.name, refusal=str(error))
        moved = mode.moved_bytes(self.total)
        rate = self.transfer.filled_bytes / self.transfer.filled_seconds if self.transfer.filled_seconds else 0.0
        return Price(mode.name, moved, mode.nbytes(self.geometry.grown(self.total)), moved / rate if rate else None)

    def truncate(self, tokens: int, num_reachable: int | None = None) -> None:
        """Forget all but the first ``tokens``; ``num_reachable`` as for ``settle``."""
        self.host.truncate(tokens)
        self.pinned[tokens:] = False
        for slots in self.slots:
            slots.truncate(tokens)
        self._decoded_last = False
        self.settle(num_reachable)

    # ---- what the model's attention calls

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Store ``key [H, n, d_k]`` and ``value [H, n, d_v]``; ``query [H_q, n, d_k]`` attends -> ``[H_q, n, d_v]``."""
        self.specs[layer] = spec
        if self._prefill is not None:
            return self._attend_prefill(self._prefill, layer, query, key, value, spec)
        return self._attend_step(layer, query[:, 0], key[:, 0], value[:, 0], spec).unsqueeze(1)

    def _attend_prefill(
        self, prefill: Prefill, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
    ) -> Tensor:
        self.query[layer].copy_(query[:, -1])
        keys, values = prefill.extended(layer, key, value)
        self.mode.prefilled(layer, self.total, keys)
        return attend_prefill(query, keys, values, self.total, spec)

    def _attend_step(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        places = self._places[layer]
        self.ops.append(places, layer, key, value)
        self.mode.attention_begin(layer, query, key, spec)
        weigh = self.mode.needs_weights(layer)
        parts = [self.ops.attend(slots, layer, query, spec, weigh) for slots in places]
        self._queries[layer] = query
        self.mode.attention_end(layer, query, [weights for _, weights in parts if weights], spec)
        return self._joined(layer, [attended for attended, _ in parts])

    def _joined(self, layer: int, parts: list[Tensor]) -> Tensor:
        """The heads' outputs in the model's order, ``[H_q, d_v]``."""
        if len(parts) == 1:
            return parts[0].flatten(0, 1)
        return torch.cat(parts).index_select(0, self._joins[layer]).flatten(0, 1)

    def phase(self) -> tuple[object, ...]:
        """Of the step at hand: two steps of the same phase run the same operations on the same memory."""
        layouts = (slots.layout for slots in self.slots)
        return self.mode, *self.mode.phase(), *layouts, *((t.data_ptr(), t.shape) for t in self.buffers())

    def buffers(self) -> list[Tensor]:
        """All that a step reads or changes and that lasts from step to step; the host pool beside it."""
        slots = [tensor for slots in self.slots for tensor in slots.buffers()]
        pool = [self.host.rows(layer) for layer in (0, self.geometry.layers - 1)]
        own = [self.query, self.position, self.pinned, self.transfer.counters, *self._joins.values()]
        return [*own, *slots, *pool, *self.mode.buffers()]

    # ---- what others read

    def scaling(self, layer: int) -> float:
        """The layer's attention scale; 1/sqrt(d_k) before the model first told."""
        spec = self.specs[layer]
        return spec.scaling if spec else self.geometry.d_k**-0.5

    @property
    def device_bytes(self) -> int:
        """Bytes of K/V, tables and bounds on the device."""
        return sum(slots.nbytes for slots in self.slots) + self.mode.device_bytes

    def attended(self, layer: int) -> Tensor:
        """Which stored tokens the last token's attention read, bool ``[H, total]``.

        After a prefill that is all; after a switch, what the next token will read.
        """
        g, spec = self.geometry, self.specs[layer]
        seen = torch.full((g.kv_heads, self.total + 1), not self._decoded_last, device=self.device)
        if self._decoded_last:
            for slots in self._places[layer]:
                heads = slots.heads_of(layer)
                table = slots.attended_of(layer).long().expand(len(heads), -1)
                # Empty slots mark one column more, which is cut off.
                columns = torch.where(table >= 0, table, self.total)
                seen[heads] = seen[heads].scatter(1, columns, True)
        seen = seen[:, : self.total]
        if spec is not None and spec.window is not None:
            positions = torch.arange(self.total, device=self.device)
            seen = seen & (positions > self.total - 1 - spec.window)
        return seen

    def active_sum(self) -> float:
        """Tokens read, mean over layers and KV heads, summed over all steps so far."""
        pairs = self._active_before + sum(int(slots.active) for slots in self.slots)
        return pairs / (self.geometry.layers * self.geometry.kv_heads)

    def attended_counts(self) -> Tensor:
        """How many (layer, KV head) pairs the last token's attention read each stored token in, int64 ``[total]``."""
        alike: Counter[tuple[int, int | None]] = Counter()
        for layer in range(self.geometry.layers):
            shared = all(slots.layout.shared for slots in self._places[layer])
            same_as = self._places[layer][0].layout.first if shared else layer
            spec = self.specs[layer]
            alike[same_as, spec.window if spec else None] += 1
        counts = torch.zeros(self.total, dtype=torch.int64, device=self.device)
        for (layer, _), times in alike.items():
            counts += times * self.attended(layer).sum(0)
        return counts

    def check_integrity(self) -> None:
        """Every readable slot holds exactly its token's stored K/V, and the last attention read no token twice.

        Keys of sinks are not compared: a mode may have rotated them.

        Raises:
            AssertionError: naming layer and head.
        """
        for layer, places in enumerate(self._places):
            for slots in places:
                self._check_slots(slots, layer)

    def _check_slots(self, slots: DeviceSlots, layer: int) -> None:
        keys, values = self.host.dense(layer, self.total)
        for row, head in enumerate(slots.heads_of(layer).tolist()):
            where = f"{self.mode.name}, layer {layer}, head {head}"
            table = slots.table_of(layer).expand(len(slots.heads_of(layer)), -1)[row].long()
            held = table[table >= 0]
            read = slots.attended_of(layer).expand(len(slots.heads_of(layer)), -1)[row]
            assert not bool((torch.bincount(read[read >= 0], minlength=1) > 1).any()), f"{where}: a token read twice"
            assert bool((held < self.total).all()), f"{where}: a token beyond the end"
            assert torch.equal(slots.values(layer)[row][table >= 0], values[head][held]), f"{where}: values"
            late = held >= slots.layout.sink
            assert torch.equal(slots.keys(layer)[row][table >= 0][late], keys[head][held][late]), f"{where}: keys"

    # ---- inside

    def _enter(self, mode: Mode) -> None:
        self._active_before += sum(int(slots.active) for slots in self.slots)
        self.slots.clear()
        self.mode = mode
        self.transfer.step_seconds.clear()
        self.capacity = self.geometry.grown(self.total)
        self.slots = [DeviceSlots(layout, self.geometry, self.device) for layout in mode.layouts(self.capacity)]
        self._place()
        # Of layers whose heads lie in several slots: where each head's output is among theirs, which growing leaves.
        self._joins = {
            layer: torch.cat([slots.heads_of(layer) for slots in places]).argsort()
            for layer, places in enumerate(self._places)
            if len(places) > 1
        }
        mode.attach(self)
        self.settle()

    def _make_room(self, tokens: int) -> None:
        """Grow the host pool, and slots that hold everything or no longer suit the mode; between steps only."""
        self._reserve(tokens)
        if tokens > self.capacity:
            self.refit(self.geometry.grown(tokens))
        elif self.mode.wants_resize():
            self.refit()

    def refit(self, capacity: int = 0) -> None:
        """Give the mode as many slots as it wants now, with what they hold; between steps only.

        ``capacity`` is the number of tokens to make room for; as before, where not given.
        """
        capacity = capacity or self.capacity
        pairs = zip(self.slots, self.mode.layouts(capacity), strict=True)
        self.slots = [s if s.layout == layout else s.grown(layout) for s, layout in pairs]
        # Not before there is room: if memory ran out the next step tries again.
        self.capacity = capacity
        self._place()

    def _reserve(self, tokens: int) -> None:
        if self.host.reserve(tokens) and not self.host.pinned:
            self.ops = self.transfer.ops = choose_ops(self.geometry, self.host, self.device)
        more = self.host.reserved - len(self.pinned)
        if more > 0:
            self.pinned = torch.nn.functional.pad(self.pinned, (0, more))

    def _place(self) -> None:
        """Note which slots hold a layer; more than one where heads differ in what they keep."""
        self._places = [
            [slots for slots in self.slots if slots.layout.first <= layer < slots.layout.last]
            for layer in range(self.geometry.layers)
        ]
