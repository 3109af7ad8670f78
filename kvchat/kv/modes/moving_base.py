"""Continues a conversation beyond the model's context by moving the base of positions.

Beyond the context, positions start again from its middle: a token's base, a multiple of half the context, is subtracted
before the model rotates its query and key. So no position exceeds the context, and float32 angles lose no precision.
Keys are stored as the model rotated them; copies on the device are rotated further by the difference of bases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvchat.kv.modes.base import ContextPolicy
from kvchat.kv.rope import Rotation, cos_sin, rotate
from kvchat.kv.state import KVState


class MovingBase(ContextPolicy):
    """Beyond the context, a prompt is read in chunks of at most ``chunk`` tokens, which also read the kept tokens."""

    is_final = False

    def __init__(self, context: int, rotations: Sequence[Rotation | None], chunk: int) -> None:
        self.context = context
        self.rotations = rotations
        self.chunk = chunk
        self._half = max(1, context // 2)
        self._limited_from: int | None = None

    def attach(
        self, state: KVState, base: Tensor, first_kept: Callable[[], int], sink: int, pins: Sequence[int]
    ) -> None:
        """Take over state that the mode updates.

        ``base`` is the next token's base (0-d int64 on the device), ``first_kept`` returns the first kept token after
        the sinks, ``sink`` is the number of sinks, and ``pins`` are the positions of pinned messages in the slots.
        """
        self._state, self._base, self._first_kept = state, base, first_kept
        self._sink, self._pins = sink, pins
        self._limited_from = None

    def bases(self, positions: Tensor) -> Tensor:
        beyond = positions - self.context
        halves = torch.div(beyond, self._half, rounding_mode="floor") + 1
        return torch.where(beyond < 0, 0, halves * self._half)

    def begins_base(self, position: int) -> bool:
        """Return whether the token at ``position`` has another base than the one before it."""
        beyond = position - self.context
        return beyond >= 0 and beyond % self._half == 0

    def moved(self, layer: int, keys: Tensor, by: Tensor) -> Tensor:
        """Return ``keys [H, n, d_k]``, each moved by its number of positions in ``by [n]``."""
        rotation = self.rotations[layer]
        return keys if rotation is None else rotate(keys, rotation, *cos_sin(rotation, by))

    def base_of(self, position: int) -> int:
        return int(self.bases(torch.tensor(position)))

    def model_position(self, position: Tensor) -> Tensor:
        return position - self._base

    def unbased(self, layer: int, keys: Tensor) -> Tensor:
        if not self.limits_prompt(keys.shape[1]):
            return keys
        return self.moved(layer, keys, self.bases(torch.arange(keys.shape[1], device=keys.device)))

    def prompt_tokens(self, total: int) -> int:
        """Return the tokens left within the context; beyond it, a chunk that ends at the next base at the latest."""
        if total < self.context:
            return self.context - total
        return min(self.chunk, self._half - (total - self.context) % self._half)

    def limits_prompt(self, tokens: int) -> bool:
        return tokens > self.context

    def begin_prompt(self, tokens: int) -> int:
        self._limited_from = self._first_kept() if self.limits_prompt(tokens) else None
        return self._limited_from or 0

    def limited(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return realigned sinks and pinned messages from their slots, then recent tokens, moved to one base."""
        if self._limited_from is None:
            return keys, values
        tokens = torch.arange(self._limited_from, self._limited_from + keys.shape[1], device=keys.device)
        recent = self.moved(layer, keys, self.bases(tokens) - self._base)
        spec, (slots,) = self._state.specs[layer], self._state.slots
        if spec.window is not None:
            return recent, values  # the sinks are outside the layer's sliding window
        kept = self._sink + sum(pin < self._limited_from for pin in self._pins)
        before = slots.keys(layer)[:, :kept], slots.values(layer)[:, :kept]
        return torch.cat((before[0], recent), 1), torch.cat((before[1], values), 1)
