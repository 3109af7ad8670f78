"""Rotary positions: moving stored keys to other positions.

Under RoPE attention depends on position differences only, so a key that was rotated to position p becomes the key at
p + delta by one more rotation. Angles are float64: a float32 angle is off by 0.01 radians at position 100,000.
Rotate from the stored key every time, never cumulatively.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary position embedding of a layer's keys.

    The ``2 * len(inv_freq)`` dimensions from ``offset`` on turn in pairs, pair i by ``inv_freq[i]`` (float64) radians
    a token; pairs are neighbors if ``interleaved``, else dimension i and the i-th of the second half.
    """

    inv_freq: Tensor
    interleaved: bool = False
    offset: int = 0


def cos_sin(rotation: Rotation, delta: Tensor | int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair's angle for a move by ``delta`` positions (an int, a 0-d tensor or one ``[n]``).

    Both are float32 [r/2] or [n, r/2], on ``rotation``'s device; layers with the same rotation can share them. A tensor
    is never read back, so this can be part of a CUDA graph.
    """
    angles = rotation.inv_freq * (delta if isinstance(delta, int) else delta.unsqueeze(-1))
    return angles.cos().float(), angles.sin().float()


def rotate(keys: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """``keys`` [..., d] moved by the positions ``cos`` and ``sin`` stand for; computed in float32, in keys' dtype.

    Dimensions that do not turn are returned unchanged. This operation does not modify ``keys``.
    """
    half = rotation.inv_freq.numel()
    turning = keys[..., rotation.offset : rotation.offset + 2 * half].float()
    if rotation.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, -1).flatten(-2) if rotation.interleaved else torch.cat(pair, -1)
    before, after = keys[..., : rotation.offset], keys[..., rotation.offset + 2 * half :]
    return torch.cat([before, rotated.to(keys.dtype), after], -1)
