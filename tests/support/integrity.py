"""Copies of the stored K/V, and a check that slots hold the tokens in their tables."""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.memory.device_slots import DeviceSlots
from kvchat.kv.memory.eight_bit_pages import LARGEST
from kvchat.kv.memory.eight_bit_pool import EightBitPool
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.state import KVState


def stored_kv(state: KVState) -> list[Tensor]:
    """Copies of what the host pool holds: keys and values of each layer, ``[H, total, d]``."""
    layers = range(state.geometry.layers)
    return [part.clone() for layer in layers for part in state.host.dense(layer, state.total)]


def check_integrity(state: KVState) -> None:
    """Check that every readable slot holds its token's stored K/V and that the last attention read no token twice.

    Keys of sinks and of pinned messages are not compared: a mode may have rotated them. Beyond the model's context
    a mode that continues rotates recent ones too, which this reports as errors. Tokens stored in 8 bits may be exact
    in a slot.

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
            continue  # attention reads the host pool itself
        off = (slots.values(layer)[row][table >= 0] - values[head][held]).abs()
        assert bool((off <= value_step[head][held]).all()), f"{where}: values"
        slot = (table >= 0).nonzero().flatten()
        as_stored = (held >= slots.layout.sink) & ((slot < slots.offset) | (slot >= slots.ring))
        off = (slots.keys(layer)[row][slot][as_stored] - keys[head][held][as_stored]).abs()
        assert bool((off <= key_step[head]).all()), f"{where}: keys"


def _steps(host: HostPool, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The allowed difference between slots and host pool: for keys ``[H, 1, d_k]``, for values ``[H, n, 1]``."""
    step = 0.55 / LARGEST + torch.finfo(keys.dtype).eps if isinstance(host, EightBitPool) else 0.0
    keys = torch.nn.functional.pad(keys, (0, 0, 0, 1))  # an empty pool has no maximum
    return keys.abs().amax(1, keepdim=True) * step, values.abs().amax(2, keepdim=True) * step
