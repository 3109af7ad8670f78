"""Reads back the tokens attended to and the contents of slots, for screens and tests; all of it waits for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.rounding import LARGEST
from kvchat.kv.state import KVState


def attended(state: KVState, layer: int) -> Tensor:
    """The stored tokens that the last token's attention read, as a mask: bool ``[H, total]``.

    After a prefill that is all; after a switch, what the next token will read.
    """
    g, spec = state.geometry, state.specs[layer]
    seen = torch.full((g.kv_heads, state.total + 1), not state.after_step, device=state.device)
    if state.after_step:
        for slots in state.slots_of[layer]:
            heads = slots.heads_of(layer)
            table = slots.attended_of(layer).long().expand(len(heads), -1)
            # Empty slots mark one column more, which is cut off.
            columns = torch.where(table >= 0, table, state.total)
            seen[heads] = seen[heads].scatter(1, columns, True)
            if slots.layout.spills:
                seen[heads, : max(0, state.total - slots.layout.window)] = True
    seen = seen[:, : state.total]
    if spec is not None and spec.window is not None:
        positions = torch.arange(state.total, device=state.device)
        seen = seen & (positions > state.total - 1 - spec.window)
    return seen


def attended_counts(state: KVState) -> Tensor:
    """Per stored token the number of (layer, KV head) pairs in which the last token read it, int64 ``[total]``."""
    alike: dict[tuple[int, int | None], list[int]] = {}
    for layer in range(state.geometry.layers):
        held = state.slots_of[layer]
        same_as = held[0].layout.first if held and all(slots.layout.shared for slots in held) else layer
        spec = state.specs[layer]
        alike.setdefault((same_as, spec.window if spec else None), []).append(layer)
    counts = torch.zeros(state.total, dtype=torch.int64, device=state.device)
    for layers in alike.values():
        counts += len(layers) * attended(state, layers[0]).sum(0)
    return counts


def read_per_head(state: KVState) -> Tensor:
    """Number of stored tokens that the last token's attention read, int64 ``[layers, H]`` on the host."""
    return torch.stack([_read_in(state, layer) for layer in range(state.geometry.layers)]).cpu()


def held_per_head(state: KVState) -> Tensor:
    """Number of stored tokens in slots that attention may read, int64 ``[layers, H]`` on the host."""
    g = state.geometry
    held = torch.zeros((g.layers, g.kv_heads), dtype=torch.int64, device=state.device)
    for layer in range(g.layers):
        for slots in state.slots_of[layer]:
            held[layer, slots.heads_of(layer)] += (slots.table_of(layer) >= 0).sum(-1)
    return held.cpu()


def _read_in(state: KVState, layer: int) -> Tensor:
    """``[H]``, counted in the tables: nothing as long as the conversation is made."""
    spec = state.specs[layer]
    first = max(0, state.total - spec.window) if spec is not None and spec.window is not None else 0
    if not state.after_step:
        return torch.full((state.geometry.kv_heads,), state.total - first, device=state.device)
    read = torch.zeros(state.geometry.kv_heads, dtype=torch.int64, device=state.device)
    for slots in state.slots_of[layer]:
        ring = max(0, state.total - slots.layout.window) if slots.layout.spills else 0
        table = slots.attended_of(layer)
        read[slots.heads_of(layer)] += (table >= max(first, ring)).sum(-1) + max(0, ring - first)
    return read


def read_tokens(state: KVState) -> float:
    """Tokens read, mean over layers and KV heads, summed over all steps so far."""
    return state.read_pairs / (state.geometry.layers * state.geometry.kv_heads)


def check_integrity(state: KVState) -> None:
    """Check that every readable slot holds its token's stored K/V and that the last attention read no token twice.

    Keys of sinks and of pinned messages are not compared: a mode may have rotated them. Beyond the model's context
    one that goes on rotates the recent ones too, which this takes for wrong. What is stored in 8 bits may be exact in
    a slot.

    Raises:
        AssertionError: naming layer and head.
    """
    for layer, held in enumerate(state.slots_of):
        for slots in held:
            _check_slots(state, slots, layer)


def _check_slots(state: KVState, slots: DeviceSlots, layer: int) -> None:
    keys, values = state.host.dense(layer, state.total)
    key_step, value_step = _steps(state.host, keys, values)
    for row, head in enumerate(slots.heads_of(layer).tolist()):
        where = f"layer {layer}, head {head}"
        table = slots.table_of(layer).expand(len(slots.heads_of(layer)), -1)[row].long()
        held = table[table >= 0]
        read = slots.attended_of(layer).expand(len(slots.heads_of(layer)), -1)[row]
        assert not bool((torch.bincount(read[read >= 0], minlength=1) > 1).any()), f"{where}: a token read twice"
        assert bool((held < state.total).all()), f"{where}: a token beyond the end"
        if slots.layout.in_place:
            continue  # what is stored is what is read
        off = (slots.values(layer)[row][table >= 0] - values[head][held]).abs()
        assert bool((off <= value_step[head][held]).all()), f"{where}: values"
        slot = (table >= 0).nonzero().flatten()
        as_stored = (held >= slots.layout.sink) & ((slot < slots.offset) | (slot >= slots.ring))
        off = (slots.keys(layer)[row][slot][as_stored] - keys[head][held][as_stored]).abs()
        assert bool((off <= key_step[head]).all()), f"{where}: keys"


def _steps(host: HostPool, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The allowed difference between stored and computed: for keys ``[H, 1, d_k]``, for values ``[H, n, 1]``."""
    step = 0.55 / LARGEST + torch.finfo(keys.dtype).eps if isinstance(host, EightBitPool) else 0.0
    keys = torch.nn.functional.pad(keys, (0, 0, 0, 1))  # where nothing is stored there is no largest
    return keys.abs().amax(1, keepdim=True) * step, values.abs().amax(2, keepdim=True) * step
