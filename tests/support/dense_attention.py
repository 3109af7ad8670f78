"""Textbook attention and rotary embedding in float64: the reference for every output."""

from __future__ import annotations

import torch
from torch import Tensor

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.rope import Rotation

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def rotated(x: Tensor, rotation: Rotation | None, positions: Tensor) -> Tensor:
    """Rotate ``x [..., n, d]`` to ``positions [n]`` in float64: multiply each pair by e^(i·position·frequency)."""
    if rotation is None:
        return x.double()
    half, low = len(rotation.inv_freq), rotation.offset
    out = x.double().clone()
    rotary = out[..., low : low + 2 * half]
    if rotation.interleaved:
        pairs = torch.complex(rotary[..., 0::2], rotary[..., 1::2])
    else:
        pairs = torch.complex(rotary[..., :half], rotary[..., half:])
    angle = positions.double()[:, None] * rotation.inv_freq
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    if rotation.interleaved:
        out[..., low : low + 2 * half] = torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    else:
        out[..., low : low + 2 * half] = torch.cat((pairs.real, pairs.imag), -1)
    return out


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    spec: AttentionSpec,
    others: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute one token's attention in float64: ``query [H_q, d_k]``, ``mask`` bool ``[H, T]`` -> ``[H_q, d_v]``.

    ``others`` are logits ``[H_q, n]`` of further tokens and their values ``[H, n, d_v]``.
    """
    weights = softmax(query, keys, mask, spec, others[0] if others else None)
    values = torch.cat((values.double(), others[1]), 1) if others else values.double()
    return (weights[:, None] @ values.repeat_interleave(len(query) // len(values), 0))[:, 0]


def softmax(query: Tensor, keys: Tensor, mask: Tensor, spec: AttentionSpec, others: Tensor | None = None) -> Tensor:
    """Compute the weights of ``dense``, ``[H_q, T + n]``."""
    group = query.shape[0] // keys.shape[0]
    keys, mask = (x.repeat_interleave(group, 0) for x in (keys.double(), mask))
    logits = spec.scaling * (keys @ query.double()[:, :, None])[:, :, 0]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if others is not None:
        logits = torch.cat((logits, others), 1)
    tokens = logits.shape[1]
    if spec.sinks is not None:
        logits = torch.cat((logits, spec.sinks.double()[:, None]), 1)
    return logits.softmax(1)[:, :tokens]


def causal(query: Tensor, keys: Tensor, values: Tensor, start: int, spec: AttentionSpec) -> Tensor:
    """Compute causal attention of tokens from ``start`` on in float64: ``query [H_q, n, d_k]`` -> ``[H_q, n, d_v]``."""
    group, n = len(query) // len(keys), query.shape[1]
    keys, values = (stored.double().repeat_interleave(group, 0) for stored in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    position, token = torch.arange(start, start + n)[:, None], torch.arange(start + n)
    hidden = token > position
    if spec.window is not None:
        hidden |= token <= position - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.double()[:, None, None].expand(-1, n, 1)), -1)
    return scores.softmax(-1)[..., : start + n] @ values


def assert_near(output: Tensor, expected: Tensor, dtype: torch.dtype, where: str) -> None:
    tolerance = TOLERANCE[dtype]
    error = float((output.double() - expected).abs().max())
    assert error <= tolerance, f"{where}: off by {error:.2g}, allowed {tolerance:.2g}"
