"""Rotary position embeddings: move stored keys to other positions.

With RoPE, attention depends only on position differences, so one more rotation turns a key at position p into the key
at p + delta. Angles are float64, because a float32 angle is off by 0.01 radians at position 100,000. Always rotate the
stored key, never a key that was rotated before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary position embedding of a layer's keys.

    The ``2 * len(inv_freq)`` dimensions from ``offset`` on rotate in pairs, pair i by ``inv_freq[i]`` (float64) radians
    per token. Pairs are neighbors if ``interleaved``, otherwise dimension i of the first and of the second half.
    """

    inv_freq: Tensor
    interleaved: bool = False
    offset: int = 0


def cos_sin(rotation: Rotation, delta: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every pair's angle for a move by ``delta`` positions (an int, a 0-d tensor or [n]).

    Both are float32 [r/2] or [n, r/2], on ``rotation``'s device; layers with the same rotation can share them. A CUDA
    graph can capture this, because no tensor is read back.
    """
    angles = rotation.inv_freq * (delta if isinstance(delta, int) else delta.unsqueeze(-1))
    return angles.cos().float(), angles.sin().float()


def rotate(keys: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a copy of ``keys [..., d]``, rotated by the angles of ``cos`` and ``sin``; computed in float32.

    The result has the dtype of ``keys``; dimensions outside the rotation are unchanged.
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
