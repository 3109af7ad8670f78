"""Operations of a decode step on a CPU, where nothing runs concurrently and reading a tensor's values never waits.

numba compiles the loops (``numba``) that choose pages, move pages and attend to K and V in the host pool, once per
machine, in separate processes. Torch replaces them until they are compiled, without numba, in float16, and for few
tokens in float32 if the weights are needed. In bfloat16 torch is 3 to 10 times slower. If no weights are needed, one
loop does the whole attention: 44 us over 512 tokens of SmolLM2 on one thread, against 80 us for torch's two products
and softmax. Tensors share memory with numpy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec, Products, Weights, attend, products
from kvchat.kv.geometry import PAGE, Geometry
from kvchat.kv.memory import eight_bit_pages
from kvchat.kv.memory.device_slots import EMPTY, SINKS_OF_GUESS, DeviceSlots
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops import key_codes
from kvchat.kv.ops.selection import Candidates, Places, TokenQuery
from kvchat.kv.ops.torch_ops import TorchOps

MANY = 2048  # float32 tokens from which the loops beat torch on two threads; below it they are not used
FEW = 32  # a loop that reads the stored tokens once for all new tokens pays off up to this many new tokens
KNOWN = (torch.float32, torch.bfloat16)  # dtypes that the loops accept
LOOPS = "kvchat.kv.ops.numba"
PAGES, TOKENS, FREEZE = f"{LOOPS}.pages", f"{LOOPS}.tokens", f"{LOOPS}.freeze"
IN_A_ROW, EIGHT_BIT = f"{LOOPS}.in_a_row", f"{LOOPS}.eight_bit"
BASE, ROWS = f"{LOOPS}.loops", f"{LOOPS}.rows"
# Modules of loops that other processes are compiling. Each event is set when compiling ends, also if it fails.
awaited: dict[str, threading.Event] = {}
_used = threading.local()
NO_MEANS, NO_WEIGHTS = np.empty((0, 0, 0), np.uint16), np.empty((0, 0, 0), np.float32)
NO_SINKS, NOTHING = np.empty((0, 0), np.float32), (np.empty(0, np.float32), 0, 0)
Arguments = tuple[Any, ...]
Numbers = np.ndarray[Any, Any]


class Stored(NamedTuple):
    """A layer's keys ``[H, token, d_k]`` and values ``[H, token, d_v]`` in numpy, over all memory of the tensor ``of``.

    ``read`` has the same as arguments for loops that attend.
    """

    of: Tensor
    keys: Numbers
    values: Numbers
    read: Arguments

    @classmethod
    def seen(cls, of: Tensor, keys: Tensor, values: Tensor) -> Stored:
        """Create the views, which takes as long as attending to 200 tokens."""
        return cls(of, numbers(keys), numbers(values), (*_rows(keys), *_rows(values)))


class CpuOps(TorchOps):
    """``TorchOps`` that may read tensor values."""

    reads_back = True
    attends_as_it_chooses: ClassVar = True  # one loop does both

    def __init__(self, geometry: Geometry, host: HostPool, device: torch.device, kernel_refusal: str = "") -> None:
        super().__init__(geometry, host, device, kernel_refusal)
        self._stored_of: dict[int, Stored] = {}

    def begin_step(self, position: Tensor) -> None:
        super().begin_step(position)
        self._now = int(position)
        self._choosing: dict[int, Callable[..., int]] = {}  # per layer: the loop that chooses when the layer attends
        of_keys, of_values = self._host_rows.chunk(2)
        self._new_rows = of_keys.numpy(), of_values.numpy()
        count, heads = self._now + 1, self.geometry.kv_heads
        # Positions of all tokens including the new one, ``[H, n]`` int32.
        self._stored_tokens = _positions(1 << count.bit_length())[:count].expand(heads, -1)

    def append(self, held: Sequence[DeviceSlots], layer: int, key: Tensor, value: Tensor) -> None:
        rows, given = numbers(self.host.rows(layer)), (numbers(key), numbers(value))
        for new, one in zip(self._new_rows, given, strict=True):
            rows[new, : one.shape[1]] = one
        for slots in held:
            if slots.kv.shape[3]:
                place, slot = self._in_slots(slots, layer), int(slots.current_slot)
                heads = slice(None) if slots.heads is None else slots.heads_of(layer).numpy()
                place.keys[:, slot], place.values[:, slot] = (one[heads] for one in given)

    def _in_pool(self, layer: int) -> Stored | None:
        """Return the layer in the host pool, the same object until the pool moves; None if loops cannot read it."""
        rows, known = self.host.rows(layer), self._stored_of.get(layer)
        if known is None or known.of is not rows:
            known = self._stored_of[layer] = Stored.seen(rows, *self._in_a_row(layer, 0, self.host.reserved))
        return known

    def _in_slots(self, slots: DeviceSlots, layer: int) -> Stored:
        known: Stored | None = slots.stored.get(layer)
        if known is None:
            known = slots.stored[layer] = Stored.seen(slots.kv, slots.keys(layer), slots.values(layer))
        return known

    def attend(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec, needs_weights: bool
    ) -> tuple[Tensor, Weights | None]:
        if slots.layout.listed:
            return self._attend_listed(slots, layer, query, spec), None
        if slots.layout.in_place:
            attended, weights = self._attend_in_place(slots, layer, query, spec)
            return attended, Weights(weights) if needs_weights else None
        if slots.layout.spills and self.geometry.unified:
            return self._attend_stored(slots, layer, query, spec), None
        if slots.layout.shared and not slots.layout.spills and not needs_weights:
            return self._attend_slots(slots, layer, query, spec), None
        return super().attend(slots, layer, query, spec, needs_weights)

    def attend_new(self, query: Tensor, keys: Tensor, values: Tensor, start: int, spec: AttentionSpec) -> Tensor:
        few = query.shape[1] <= FEW and start >= MANY
        found = attended_rows(query, keys, values, start, spec) if few else None
        return super().attend_new(query, keys, values, start, spec) if found is None else found

    def products(self, keys: Tensor, values: Tensor) -> Products:
        return in_a_row(keys, values)

    def _attend_stored(self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend in place to every token that the layer sees, or to sinks and recent tokens if the slots guess."""
        end, recent = self._now + 1, slots.recent_only
        first = spec.first_seen(end)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        if recent and end - first > SINKS_OF_GUESS + recent:
            table = torch.cat((torch.arange(first, first + SINKS_OF_GUESS), torch.arange(end - recent, end)))
            table = table.to(torch.int32).expand(self.geometry.kv_heads, -1).contiguous()
            return self._attend_some(layer, grouped, table, spec, sinks)
        slots.read_pairs += self.geometry.kv_heads * (end - first)
        return self._attend_all(layer, grouped, first, spec, sinks)

    def _attend_slots(self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend to slots whose table all layers and heads share."""
        bias = slots.bias(layer, self.position, spec.window)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        table = slots.unmasked(bias, spec.window).expand(len(grouped), -1)
        found = self._attend_by_loop(grouped, self._in_slots(slots, layer), table, spec, sinks)
        if found is None:
            return attend(grouped, self.products(slots.keys(layer), slots.values(layer)), bias, spec, sinks)[0]
        return found

    def _attend_by_loop(
        self, query: Tensor, stored: Stored | None, table: Tensor, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor | None:
        """Attend with ``query [H, G, d_k]`` to the tokens ``table [H, n]``: ``[H, G, d_v]``, or None without a loop."""
        if not (stored and (loops := _threaded(self.geometry.dtype, TOKENS))):
            return None
        made = torch.empty((*query.shape[:2], self.geometry.d_v))
        loops.attend_tokens(*_asked(query, spec, sinks), *stored.read, table.numpy(), made.numpy(), 0, NO_WEIGHTS)
        return made.to(query.dtype)

    def _weigh_by_loop(
        self, query: Tensor, layer: int, table: Tensor, spec: AttentionSpec, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Like ``_attend_by_loop``, over stored tokens; also return their weights, float32 ``[H, G, n]``."""
        if not ((stored := self._in_pool(layer)) and (loops := _threaded(self.geometry.dtype, TOKENS))):
            return None
        made, weights = (torch.empty((*query.shape[:2], size)) for size in (self.geometry.d_v + 1, table.shape[1]))
        asked = *_asked(query, spec, sinks), *stored.read
        loops.attend_tokens(*asked, table.numpy(), made.numpy(), 1, weights.numpy())
        return made[..., :-1].to(query.dtype), weights

    def _attend_listed(self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend in place to the tokens in each head's table."""
        end, place = self._now + 1, layer - slots.layout.first
        first = spec.first_seen(end)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        found = None
        if (loop := self._choosing.pop(layer, None)) and (stored := self._in_pool(layer)):
            asked = *_asked(grouped, spec, sinks), *stored.read
            found = torch.empty((*grouped.shape[:2], self.geometry.d_v))
            slots.named[place] = loop(*asked, slots.table_of(layer).numpy(), found.numpy())
        named = slots.named[place]
        slots.read_pairs += self.geometry.kv_heads * named
        if found is not None:
            return found.to(query.dtype)
        if named == end - first:
            return self._attend_all(layer, grouped, first, spec, sinks)
        other_part = slots.other_part() if slots.other_part else None
        return self._attend_some(layer, grouped, slots.table_of(layer)[:, :named], spec, sinks, other_part)

    def _attend_all(self, layer: int, query: Tensor, first: int, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """Attend with ``query [H, G, d_k]`` to the stored tokens from ``first`` on."""
        found = self._attend_by_loop(query, self._in_pool(layer), self._stored_tokens[:, first:], spec, sinks)
        if found is None:
            return attend(query, self._products_of_all(layer, first), None, spec, sinks)[0]
        return found

    def _attend_some(
        self,
        layer: int,
        query: Tensor,
        table: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None,
        other_part: Tensor | None = None,
    ) -> Tensor:
        """Attend with ``query [H, G, d_k]`` to the tokens in ``table [H, n]``; ``other_part`` as in ``attend``."""
        found = self._attend_by_loop(query, self._in_pool(layer), table, spec, sinks) if other_part is None else None
        if found is None:
            return attend(query, self._products_of_some(layer, table), None, spec, sinks, other_part)[0]
        return found

    def _attend_in_place(
        self, slots: DeviceSlots, layer: int, query: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Attend in place to the tokens in the table; also return the weights of these slots."""
        slots.bias(layer, self.position, spec.window)  # counts what is read
        end, named = self._now + 1, int(slots.current_slot) + 1  # slots are filled from the front, the new token last
        first, table = spec.first_seen(end), slots.table[0, :, :named]
        unseen = int((table < first).sum()) if first else 0
        table = table[:, unseen:].expand(self.geometry.kv_heads, -1)
        grouped, sinks = self._of_slots(slots, layer, query, spec)
        if named == end:
            attended, weights = attend(grouped, self._products_of_all(layer, first), None, spec, sinks)
        elif found := self._weigh_by_loop(grouped, layer, table, spec, sinks):
            attended, weights = found
        else:
            attended, weights = attend(grouped, self._products_of_some(layer, table), None, spec, sinks)
        return attended, torch.nn.functional.pad(weights, (unseen, 0)) if unseen else weights

    def _products_of_all(self, layer: int, first: int) -> Products:
        """Return the products with the stored tokens from ``first`` on."""
        return self.products(*self._in_a_row(layer, first, self._now + 1))

    def _products_of_some(self, layer: int, table: Tensor) -> Products:
        """Return the products with the tokens in ``table [H or 1, n]``."""
        return products(*self._gathered(layer, table))

    def _in_a_row(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the tokens from ``first`` up to ``end``."""
        keys, values = self.host.by_head(layer)[:, :, first:end].unbind()
        return keys[..., : self.geometry.d_k], values[..., : self.geometry.d_v]

    def _gathered(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of the tokens in ``table [H or 1, n]``."""
        keys, values = self._stored(layer, table.clamp(min=0).long(), self._heads[:, None])
        return keys[..., : self.geometry.d_k], values[..., : self.geometry.d_v]

    def keys(self, slots: DeviceSlots, layer: int) -> Tensor:
        return self._gathered(layer, slots.table[0])[0] if slots.layout.in_place else super().keys(slots, layer)

    def bias(self, slots: DeviceSlots, layer: int, window: int | None) -> Tensor:
        table = slots.table_of(layer)
        # A table shared by all layers is examined only once per step.
        if slots.layout.shared or not (loops := loops_over(self.geometry.dtype)):
            return super().bias(slots, layer, window)
        bias = torch.empty(table.shape)
        first = 0 if window is None else max(0, self._now + 1 - window)
        slots.read_pairs += loops.open_slots(table.numpy(), slots.attended_of(layer).numpy(), first, bias.numpy())
        return bias.unsqueeze(1)

    def page_scores(self, query: Tensor, bounds: Tensor, scaling: float) -> Tensor:
        if not (loops := loops_over(bounds.dtype)):
            return super().page_scores(query, bounds, scaling)
        grouped = query.contiguous().float().view(len(bounds), -1, query.shape[-1])
        scores = torch.empty((*grouped.shape[:2], bounds.shape[1]))
        loops.page_scores(grouped.numpy(), numbers(bounds), scaling, scores.numpy())
        return scores

    def choose(self, scores: Tensor, candidates: Candidates, resident: Tensor, flagged: Tensor | None = None) -> Tensor:
        if not (loops := compiled_loops()):
            return super().choose(scores, candidates, resident, flagged)
        first, last = candidates.first, int(candidates.last)
        if last < first or not resident.numel():
            return torch.full_like(resident, EMPTY)
        placed = torch.empty_like(resident)
        loops.choose(scores.float().numpy(), first, last, resident.numpy(), placed.numpy())
        return placed if flagged is None else torch.where(flagged[:, None], placed, resident)

    def list_tokens(
        self, slots: DeviceSlots, layer: int, by: TokenQuery, places: Places, k: int, pinned: Tensor, in_step: bool
    ) -> Tensor | None:
        g, table = self.geometry, slots.table_of(layer)
        if not (k and g.page == PAGE and (loops := _threaded(g.dtype, TOKENS))):
            return super().list_tokens(slots, layer, by, places, k, pinned, in_step)
        query, index, bits, scaling, means = by
        grouped = query.contiguous().float().view(g.kv_heads, g.group, g.d_k).numpy()
        words = index.numpy()
        stored = words.view(np.uint32), words.view(np.uint16)
        sizes = key_codes.width_of(g.d_k, bits), bits
        joined = NO_MEANS if means is None else numbers(means)
        loop = partial(loops.choose_and_attend, grouped, *stored, *sizes, *places, k, pinned.numpy(), joined)
        if in_step and self.attends_as_it_chooses:
            self._choosing[layer] = partial(loop, 1)
            return None
        unread = torch.empty((g.kv_heads, g.group, joined.shape[2] + 1))
        unattended = scaling, 0.0, NO_SINKS, *NOTHING, *NOTHING, table.numpy(), unread.numpy()
        slots.named[layer - slots.layout.first] = loop(0, grouped, *unattended)
        return None if means is None else unread

    def open_pages(self, slots: DeviceSlots, layers: slice, first: int, last: Tensor) -> None:
        if not (loops := compiled_loops()):
            super().open_pages(slots, layers, first, last)
            return
        pages, table = slots.pages[layers].numpy(), slots.table[layers].numpy()
        loops.open_pages(pages, table, self.geometry.page, first, int(last))

    def move_pages(self, slots: DeviceSlots, layer: int, placed: Tensor, resident: Tensor, counters: Tensor) -> None:
        if not (loops := compiled_loops()):
            super().move_pages(slots, layer, placed, resident, counters)
            return
        source, target = (rows.view(torch.int64).numpy() for rows in (self.host.blocks(layer), slots.blocks(layer)))
        target = target.reshape(2, len(placed), -1, target.shape[1])
        pages = slots.heads_of(layer).numpy(), placed.numpy(), resident.numpy()
        loops.move_pages(source, target, *self.host.block_strides, *pages, self.geometry.page, counters.numpy())

    def _move(
        self, host: Tensor, slots: Tensor, source: Tensor, v_source: int, target: Tensor, v_target: int, changed: Tensor
    ) -> None:
        if not (loops := compiled_loops()):
            super()._move(host, slots, source, v_source, target, v_target, changed)
            return
        stored, held = (rows.view(torch.uint8).numpy() for rows in (host, slots))
        loops.move_rows(stored, held, source.numpy(), v_source, target.numpy(), v_target, changed.numpy())


@lru_cache(maxsize=1)
def _positions(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def compiled_loops(name: str = PAGES) -> ModuleType | None:
    """Import a module of loops; return None if numba does not work here or the module is still ``awaited``.

    Importing numba takes 0.5 s, so it happens on first use.
    """
    return None if name in awaited else imported(name)


def needed_loops(name: str) -> ModuleType | None:
    """Wait for a module of loops that torch cannot replace, and return it; None if numba does not work here."""
    if event := awaited.get(name):
        event.wait()
    return imported(name)


@cache
def imported(name: str) -> ModuleType | None:
    """Import a module of loops, compiling it unless it is cached; return None if numba does not work here."""
    try:
        return import_module(name)
    except (ImportError, OSError, MemoryError):  # numba does not support this numpy or Python, or lacks memory
        return None


def loops_over(dtype: torch.dtype, name: str = PAGES) -> ModuleType | None:
    """Return ``compiled_loops`` that accept stored numbers of ``dtype``; None if no loops do."""
    found = compiled_loops(name) if dtype in KNOWN else None
    if found and dtype == torch.bfloat16:
        from kvchat.kv.ops.numba import loops

        loops.compile_for_bfloat16(name)
    return found


def use_threads(threads: int) -> None:
    """Set the number of threads of the compiled loops that this thread calls."""
    if getattr(_used, "threads", 0) != threads and imported(BASE):  # setting an unchanged number costs numba 5 us
        from kvchat.kv.ops.numba import loops

        loops.use_threads(threads)
        _used.threads = threads


def numbers(stored: Tensor) -> Numbers:
    """Return a numpy view of ``stored``; of bfloat16, which numpy lacks, the bits as uint16."""
    return (stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored).numpy()


# ---- over contiguous tokens
def in_a_row(keys: Tensor, values: Tensor) -> Products:
    """Return the products with ``keys [H, n, d_k]`` and ``values [H, n, d_v]``."""
    few = keys.dtype == torch.float32 and keys.shape[1] < MANY
    if few or not (loops := _threaded(keys.dtype, IN_A_ROW)):
        return products(keys, values)
    return _compiled(loops, keys.shape[1], values, _rows(keys), _rows(values))


# ---- over pages of which some have 8 bits
def mixed(full_precision: Tensor, eight_bit: Tensor, places: Tensor, table: Tensor, g: Geometry) -> Products | None:
    """Return the products with the tokens in ``table [H or 1, n]``, ascending; None if no loop can compute them.

    ``places [page]`` says which pool has a page: ``full_precision [2, H, token, d]`` or
    ``eight_bit [page, H, block_bytes]``.
    """
    size = g.dtype.itemsize
    whole = 2 * g.page * g.d % size == eight_bit_pages.block_bytes(g) % size == 0
    if not whole or not (loops := _threaded(g.dtype, EIGHT_BIT)):
        return None
    blocks = eight_bit.view(-1)
    codes = blocks.view(torch.int8).numpy(), numbers(blocks.view(g.dtype)), eight_bit_pages.block_bytes(g), g.page
    named = table.numpy(), places.numpy()
    keys, values = full_precision[0, ..., : g.d_k], full_precision[1, ..., : g.d_v]
    stored = ((*named, *_rows(rows), *codes) for rows in (keys, values))
    return _compiled(loops, table.shape[1], values, *stored)


# ---- over chosen tokens
def attended_part(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor | None:
    """Return one part of an attention, float32 ``[H, G, d_v + 1]`` with the log-sum-exp last; None without a loop.

    ``query [H, G, d_k]`` attends to the tokens ``table [H, n]`` of ``keys [H, token, d_k]`` and
    ``values [H, token, d_v]``.
    """
    if not (loops := _threaded(keys.dtype, TOKENS)):
        return None
    made = torch.empty((*query.shape[:2], values.shape[-1] + 1))
    stored = *_rows(keys), *_rows(values)
    loops.attend_tokens(*_asked(query, spec, sinks), *stored, table.numpy(), made.numpy(), 1, NO_WEIGHTS)
    return made


def _asked(query: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Arguments:
    """Return the arguments of attending loops that precede keys and values."""
    logits = NO_SINKS if sinks is None else sinks.float().contiguous().numpy()
    return query.contiguous().float().numpy(), spec.scaling, spec.softcap or 0.0, logits


# ---- a few new tokens at once
def attended_rows(query: Tensor, keys: Tensor, values: Tensor, start: int, spec: AttentionSpec) -> Tensor | None:
    """Compute ``attend_prefill``; return None if no loop can."""
    if not (loops := _threaded(keys.dtype, ROWS)) or values.shape[-1] % loops.LANES:
        return None
    heads, end, d_k = keys.shape
    n = query.shape[1]
    grouped = query.float().reshape(heads, -1, d_k) * spec.scaling
    rows = grouped.shape[1]
    vectors = -(-rows // loops.LANES)
    padded = torch.nn.functional.pad(grouped, (0, 0, 0, vectors * loops.LANES - rows))
    asked = padded.view(heads, vectors, loops.LANES, d_k).transpose(2, 3).contiguous().numpy()
    window = end if spec.window is None else spec.window
    seen = max(0, start - window + 1), end, n, window
    made = torch.empty((heads, -(-rows // loops.ROWS) * loops.ROWS, values.shape[-1]))
    logits = NO_SINKS
    if spec.sinks is not None:
        of_rows = spec.sinks.float().view(heads, -1).repeat_interleave(n, 1)
        logits = torch.nn.functional.pad(of_rows, (0, made.shape[1] - rows)).numpy()
    loops.attend_rows(asked, *_rows(keys), *_rows(values), *seen, spec.softcap or 0.0, logits, made.numpy())
    return made[:, :rows].reshape(len(query), n, -1).to(query.dtype)


# ---- helpers
def _threaded(dtype: torch.dtype, name: str) -> ModuleType | None:
    """Return ``loops_over`` numbers of ``dtype`` that run on as many threads as torch."""
    if loops := loops_over(dtype, name):
        use_threads(torch.get_num_threads())
    return loops


def _compiled(loops: ModuleType, tokens: int, stored: Tensor, keys: Arguments, values: Arguments) -> Products:
    """Return the products that a module's loops compute over ``tokens`` tokens with values ``stored [..., d_v]``.

    ``keys`` and ``values`` are arguments for the loops.
    """

    def scores(query: Tensor) -> Tensor:
        made = torch.empty((*query.shape[:2], tokens))
        loops.scores(query.contiguous().float().numpy(), *keys, made.numpy())
        return made

    def sums(weights: Tensor) -> Tensor:
        heads, group, _ = weights.shape
        made = torch.empty((heads, -(-tokens // loops.TOKENS), group, stored.shape[-1]))
        loops.sums(weights.contiguous().numpy(), *values, made.numpy())
        return made.sum(1).to(stored.dtype)

    return Products(scores, sums)


def _rows(rows: Tensor) -> Arguments:
    """Return the memory of ``rows [H, n, d]`` as one flat array, and the strides of heads and tokens in it."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return numbers(rows.as_strided((last + 1,), (1,))), *rows.stride()[:2]
