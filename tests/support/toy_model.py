"""A toy model: random q, k and v for every token id, in independent layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from support.dense_attention import rotated
from torch import Tensor

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import ModelTraits
from kvchat.kv.modes.sync_heads import Calibration
from kvchat.kv.rope import Rotation

CONTEXT = 8192


@dataclass(frozen=True)
class Toy:
    """Independent layers: token id -> content of q, k, v ``[layers, heads, ids, d]`` (float64).

    ``plain`` layers have no window, cap or learned sinks; neighboring ids have similar queries, in some heads more
    than in others, so that a correction threshold flags some heads and not others.
    """

    geometry: Geometry
    specs: tuple[AttentionSpec, ...]
    rotations: tuple[Rotation | None, ...]
    contents: tuple[Tensor, Tensor, Tensor]

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(CONTEXT, self.rotations, None, calibration(self.geometry))

    def qkv(self, layer: int, ids: list[int], start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Project the tokens ``ids``, the first at position ``start``, to ``[heads, n, d]`` each."""
        positions = torch.arange(start, start + len(ids))
        q, k, v = (content[layer][:, ids] for content in self.contents)
        both = rotated(torch.cat((q, k)), self.rotations[layer], positions).to(self.geometry.dtype)
        return both[: len(q)], both[len(q) :], v.to(self.geometry.dtype)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 24},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "unrotated": {},
}


def toy(
    kinds: tuple[str, ...] = ("plain", "plain", "plain"),
    *,
    kv_heads: int = 2,
    group: int = 2,
    d_k: int = 16,
    d_v: int = 16,
    page: int = 32,
    dtype: torch.dtype = torch.float32,
    interleaved: bool = False,
    unified: bool = False,
    ids: int = 1024,
    seed: int = 0,
) -> Toy:
    geometry = Geometry(len(kinds), kv_heads * group, kv_heads, d_k, d_v, dtype, page, unified=unified)
    freq = 100.0 ** -(torch.arange(d_k // 4, dtype=torch.float64) / (d_k // 4))
    rotation = Rotation(freq, interleaved, offset=d_k // 4)

    contents, drawn = _contents(len(kinds), geometry.q_heads, kv_heads, d_k, d_v, ids, seed)
    random = torch.Generator()
    random.set_state(drawn)

    def spec(kind: str) -> AttentionSpec:
        extra = dict(KINDS[kind])
        if "sinks" in extra:
            extra["sinks"] = torch.randn(geometry.q_heads, generator=random).to(dtype)
        return AttentionSpec(d_k**-0.5, **extra)

    rotations = tuple(None if kind == "unrotated" else rotation for kind in kinds)
    return Toy(geometry, tuple(spec(kind) for kind in kinds), rotations, contents)


@lru_cache(maxsize=8)  # neighboring tests use the same
def _contents(
    layers: int, q_heads: int, kv_heads: int, d_k: int, d_v: int, ids: int, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The contents of q, k and v, and the state of the random numbers after them."""
    random = torch.Generator().manual_seed(seed)

    def content(heads: int, d: int) -> Tensor:
        return torch.randn(layers, heads, ids, d, generator=random, dtype=torch.float64)

    queries = content(q_heads, d_k)
    stay = torch.linspace(0.6, 0.99, q_heads, dtype=torch.float64)[:, None]
    for i in range(1, ids):
        queries[:, :, i] = stay * queries[:, :, i - 1] + (1 - stay**2).sqrt() * queries[:, :, i]
    return (queries, 1.5 * content(kv_heads, d_k), content(kv_heads, d_v)), random.get_state()


def calibration(geometry: Geometry) -> Calibration:
    """Make neighboring heads similar, so that clusters are runs of neighbors; retrieval scores differ by layer."""
    heads = range(geometry.kv_heads)
    similarity = tuple(tuple(1 - abs(a - b) / 8 for b in heads) for a in heads)
    retrieval = tuple(tuple(((7 * head + 3 * layer) % 5) / 5 for head in heads) for layer in range(geometry.layers))
    return Calibration("toy", "nothing", 1, (similarity,) * geometry.layers, retrieval)
