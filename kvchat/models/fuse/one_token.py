"""One decoded token's layer on a CPU whose weights are packed: one compiled loop before its attention, and one after.

Its operations one by one are some 60 calls of torch and numpy.
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


def _given(norm: Norm | None) -> tuple[Any, float]:
    """As loops take it."""
    return (numbers(None), 0.0) if norm is None else (numbers(norm.weight), norm.eps)


class OneTokenLayer:
    """A layer with the attention module ``attention`` and these weights.

    Args:
        attention: the module.
        heads: numbers of query, key and value heads.
        qkv: the merged matrix of queries, keys and values, its bias, and the norm before it.
        head_norms: that of each query and that of each key; or none.
        output: the matrix behind attention, its bias, and the norm of what it adds, if there is one.
        gate_up: the merged matrix of gate and up, the norm before it, and the number of the gate in ``GATES``.
        down: the last matrix, as ``output``.
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
        self._room = sum(heads), attention.head_dim
        rows = [norm.weight.float().expand(count, -1) for norm, count in zip(head_norms, heads, strict=False)]
        of_heads = torch.cat(rows) if rows else torch.empty(0, attention.head_dim)
        eps = [norm.eps for norm in head_norms] or [0.0, 0.0]
        self._before = qkv[0], numbers(qkv[1]), *_given(qkv[2]), of_heads.detach().numpy(), *eps
        attention, mlp = ((matrix, numbers(bias), *_given(norm)) for matrix, bias, norm in (output, down))
        self._after = *attention, gate_up[0], *_given(gate_up[1]), gate_up[2], *mlp

    def __call__(self, hidden: Tensor, cos: Any, sin: Any) -> Tensor:
        """The output ``[1, 1, K]`` for ``hidden [1, 1, K]``, with arrays ``cos`` and ``sin [d]``, all in float32."""
        loops = product_loops()
        assert loops is not None
        use_threads(torch.get_num_threads())
        given, heads = hidden.view(-1).numpy(), torch.empty(self._room)
        loops.begin_layer(*self._before, given, cos, sin, *self._heads[:2], heads.numpy())
        query, key, value = heads.split_with_sizes(self._heads)
        attended = attention_hook.attend_token(self._attention, query, key, value)
        out = torch.empty(hidden.shape)
        loops.end_layer(*self._after, attended.reshape(-1).numpy(), given, out.view(-1).numpy())
        return out
