"""A layer with packed weights, for one token on a CPU: one compiled loop before its attention, and one after.

Its separate operations would take about 60 calls of torch and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvchat.kv.ops.cpu_ops import use_threads
from kvchat.models import attention_hook
from kvchat.models.quantize.rows import Arrays, numbers, product_loops


class Norm(NamedTuple):
    """An RMSNorm: ``weight`` [K] and epsilon."""

    weight: Tensor
    eps: float


def _arguments(norm: Norm | None) -> tuple[Any, float]:
    """Return the arguments of a loop for ``norm``."""
    return (numbers(None), 0.0) if norm is None else (numbers(norm.weight), norm.eps)


class OneTokenLayer:
    """A layer for one token.

    Args:
        attention: attention module.
        heads: numbers of query, key and value heads.
        qkv: merged matrix of queries, keys and values, its bias, and the preceding norm.
        head_norms: norms of queries and of keys, or empty.
        output: matrix after attention, its bias, and the norm before the sum or None.
        gate_up: merged matrix of gate and up, the preceding norm, and the number of the gate in ``GATES``.
        down: last matrix, as ``output``.
    """

    def __init__(
        self,
        attention: Any,
        heads: list[int],
        qkv: tuple[Arrays, Tensor | None, Norm],
        head_norms: Sequence[Norm],
        output: tuple[Arrays, Tensor | None, Norm | None],
        gate_up: tuple[Arrays, Norm, int],
        down: tuple[Arrays, Tensor | None, Norm | None],
    ) -> None:
        self._attention, self._heads = attention, heads
        self._shape = sum(heads), attention.head_dim
        rows = [norm.weight.float().expand(count, -1) for norm, count in zip(head_norms, heads, strict=False)]
        of_heads = torch.cat(rows) if rows else torch.empty(0, attention.head_dim)
        eps = [norm.eps for norm in head_norms] or [0.0, 0.0]
        self._before = qkv[0], numbers(qkv[1]), *_arguments(qkv[2]), of_heads.detach().numpy(), *eps
        attention, mlp = ((matrix, numbers(bias), *_arguments(norm)) for matrix, bias, norm in (output, down))
        self._after = *attention, gate_up[0], *_arguments(gate_up[1]), gate_up[2], *mlp

    def __call__(self, hidden: Tensor, cos: Any, sin: Any) -> Tensor:
        """Return the layer's output for ``hidden [1, 1, K]`` and arrays ``cos``, ``sin [d]``, all in float32."""
        loops = product_loops()
        assert loops is not None
        use_threads(torch.get_num_threads())
        row, heads = hidden.view(-1).numpy(), torch.empty(self._shape)
        loops.begin_layer(*self._before, row, cos, sin, *self._heads[:2], heads.numpy())
        query, key, value = heads.split_with_sizes(self._heads)
        attended = attention_hook.attend_token(self._attention, query, key, value)
        out = torch.empty(hidden.shape)
        loops.end_layer(*self._after, attended.reshape(-1).numpy(), row, out.view(-1).numpy())
        return out
