"""One decoded token's layer on a CPU whose weights are packed: one compiled loop before its attention, and one after.

Its operations one by one are some 60 calls of torch and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvchat.kv.ops.cpu_ops import use_threads
from kvchat.models import attention_hook
from kvchat.models.quantize.rows import Arrays, numbers, product_loops


class OneTokenLayer:
    """A layer with the attention module ``attention`` and these weights.

    Args:
        attention: the module.
        heads: numbers of query, key and value heads.
        qkv: the merged matrix of queries, keys and values, its bias, and the norm before it with its epsilon.
        head_norms: that of each query and that of each key; or none.
        output: the matrix behind attention and its bias.
        gate_up: the merged matrix of gate and up, and the norm before it with its epsilon.
        down: the last matrix and its bias.
    """

    def __init__(
        self,
        attention: Any,
        heads: list[int],
        qkv: tuple[Arrays, Tensor | None, Tensor, float],
        head_norms: Sequence[Any],
        output: tuple[Arrays, Tensor | None],
        gate_up: tuple[Arrays, Tensor, float],
        down: tuple[Arrays, Tensor | None],
    ) -> None:
        self._attention, self._heads = attention, heads
        self._room = sum(heads), attention.head_dim
        rows = [norm.weight.float().expand(count, -1) for norm, count in zip(head_norms, heads, strict=False)]
        of_heads = torch.cat(rows) if rows else torch.empty(0, attention.head_dim)
        eps = [norm.eps for norm in head_norms] or [0.0, 0.0]
        self._before = qkv[0], numbers(qkv[1]), numbers(qkv[2]), qkv[3], of_heads.detach().numpy(), *eps
        after = output[0], numbers(output[1]), gate_up[0], numbers(gate_up[1]), gate_up[2]
        self._after = *after, down[0], numbers(down[1])

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
