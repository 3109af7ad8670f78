"""The operations of fused modules: stock torch, and for one decoded token the Triton kernels where they run.

One decoded token's products are Triton kernels on a GPU (``kernels``). torch.compile is no alternative: it ends a graph
at the KV manager in every layer, took 27 s for an 8B model (H200, static cache), and does not put a norm into cuBLAS's
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.engine.model.fusion.one_row import is_one_row, linear
from kvchat.engine.model.merging import merge
from kvchat.engine.model.packed_rows import PackedRows, Weight, weight_of


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: ``weight`` [K] and epsilon."""

    weight: Tensor
    eps: float


class Operations:
    """The operations of fused modules: stock torch, and ``kernels`` for one token where they are given."""

    def __init__(self, kernels: ModuleType | None) -> None:
        self._kernels = kernels
        self._sin: Tensor | None = None
        self._signed_sin: Tensor | None = None

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """RMSNorm of ``x [..., K]``."""
        if x.device.type == "cpu" and is_one_row(x):
            # torch's own takes 20 to 60 us for one token. A CPU may ask for the sum.
            row = x.float().view(-1)
            scale: float = (float(torch.dot(row, row)) / row.shape[0] + norm.eps) ** -0.5
            return (row * scale).mul_(norm.weight).view(x.shape).to(x.dtype)
        return F.rms_norm(x.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)

    def project(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x [..., K]``, normalized if ``norm`` is given, through ``weight [N, K]``, plus ``residual [..., N]``."""
        if self._kernels and is_one_row(x):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            result: Tensor = self._kernels.project(x, weight, bias, scale, eps, residual)
            return result
        projected = linear(x if norm is None else self.normed(x, norm), weight, bias)
        return projected if residual is None else projected.add_(residual)

    def gated(self, x: Tensor, weight: Weight, norm: Norm) -> Tensor:
        """``silu(gate) * up`` of ``x [..., K]`` normalized; ``weight [2 N, K]`` is gate's above up's."""
        if self._kernels and is_one_row(x) and isinstance(weight, Tensor):
            gate_weight, up_weight = weight.chunk(2)
            result: Tensor = self._kernels.gated(x, gate_weight, up_weight, norm.weight, norm.eps)
            return result
        gate, up = linear(self.normed(x, norm), weight).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate ``query [1, H_q, n, d]`` and ``key [1, H, n, d]`` by ``cos`` and ``sin [1, n, d]``, all d of them."""
        if self._kernels:
            rotated: tuple[Tensor, Tensor] = self._kernels.rotate(query, key, cos, sin)
            return rotated
        return self._rotated(query, cos, sin), self._rotated(key, cos, sin)

    def rotate_together(self, heads: Tensor, queries: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``rotate`` of ``heads [1, H_q + H, n, d]``, of which the first ``queries`` are the query's."""
        if self._kernels:
            return self.rotate(heads[:, :queries], heads[:, queries:], cos, sin)
        rotated = self._rotated(heads, cos, sin)
        return rotated[:, :queries], rotated[:, queries:]

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = sin.shape[-1] // 2
        if sin is not self._sin:  # all layers of a forward get the same
            self._sin, self._signed_sin = sin, torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]
        assert self._signed_sin is not None
        rotated = torch.addcmul(heads * cos[:, None], heads.roll(half, -1), self._signed_sin)
        return rotated.to(heads.dtype)  # some models' angles are float32 whatever they run in


class MergedLinear:
    """Several Linears of one input as one product; ``norm``, set before the call, is applied to that input first.

    The Linear called first computes all parts; the others return theirs when they are called with the same input.
    """

    def __init__(self, linears: list[nn.Linear], operations: Operations) -> None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.weight = merge_weights(linears)
        self.bias = merge(biases) if biases else None
        self.norm: Norm | None = None
        self.sizes = [linear.out_features for linear in linears]
        self._operations = operations
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output ``[..., N]`` of Linear ``index`` for ``x [..., K]``."""
        if x is not self._input or self._parts[index] is None:
            norm, self.norm = self.norm, None
            product = self._operations.project(x, self.weight, self.bias, norm)
            self._input, self._parts = x, list(torch.split(product, self.sizes, -1))
        part, self._parts[index] = self._parts[index], None
        if not any(other is not None for other in self._parts):
            self._input = None
        assert part is not None
        return part


class Output:
    """A Linear that adds the ``residual`` set before the call."""

    def __init__(self, linear: nn.Linear, operations: Operations) -> None:
        self._linear = linear
        self._operations = operations
        self.residual: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        return self._operations.project(x, weight_of(self._linear), self._linear.bias, None, residual)


def merge_weights(linears: Sequence[nn.Linear]) -> Weight:
    """The weights of Linears of one input as one matrix, of which theirs become views."""
    rows = weight_of(linears[0])
    return rows.merged(linears) if isinstance(rows, PackedRows) else merge([linear.weight for linear in linears])
