"""One forward for most models' attention modules: project, rotate, attend, project.

A module that does that and nothing else is found by what it computes for a few tokens. On a CPU the modules, views and
look-ups of its own forward take a tenth of the time of a token of the bundled model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvchat.engine.model import attention_hook, tolerances
from kvchat.engine.model.dense_attention import DenseManager
from kvchat.engine.model.fusion.operations import MergedLinear, Norm, Operations
from kvchat.engine.model.fusion.recognize import numbers
from kvchat.engine.model.packed_rows import PackedRows, weight_of

CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
TOKENS = 3  # of the check


class FusedAttention:
    """The attention ``module``, whose projections are ``merged``."""

    def __init__(self, module: Any, merged: MergedLinear, operations: Operations) -> None:
        self._module = module
        self._merged = merged
        self._operations = operations
        self._size: int = module.head_dim
        self._queries, self._keys, _ = (size // self._size for size in merged.sizes)

    def suits(self, hidden: Tensor, arguments: dict[str, Any]) -> bool:
        """True if the fused forward computes this call: no mask, no cache of transformers, angles of its size."""
        if arguments.get("attention_mask") is not None or arguments.get("past_key_values") is not None:
            return False
        angles = arguments.get("position_embeddings")
        return angles is not None and angles[0].shape == (1, hidden.shape[1], self._size)

    def __call__(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """The module's output for ``hidden [1, n, K]``, normalized if given, plus ``residual [1, n, K]``.

        ``angles`` are the cosines and sines ``[1, n, d]`` of its positions.
        """
        merged, output, tokens = self._merged, self._module.o_proj, hidden.shape[1]
        product = self._operations.project(hidden, merged.weight, merged.bias, norm)
        heads = product.view(1, tokens, -1, self._size).transpose(1, 2)
        rotates = self._queries + self._keys
        query, key = self._operations.rotate_together(heads[:, :rotates], self._queries, *angles)
        value = heads[:, rotates:]
        attended, _ = attention_hook.attention(self._module, query, key, value, None)
        return self._operations.project(attended.flatten(2), weight_of(output), output.bias, None, residual)


def fused_attention(
    module: Any, merged: MergedLinear, operations: Operations, dtype: torch.dtype
) -> FusedAttention | None:
    """The same as one function, checked with states in ``dtype``; None where the module computes something else."""
    if module._modules.keys() != CHILDREN or not isinstance(getattr(module, "head_dim", None), int):
        return None
    fused = FusedAttention(module, merged, operations)
    return fused if _agrees(module, fused, dtype) else None


def _agrees(module: Any, fused: FusedAttention, dtype: torch.dtype) -> bool:
    """True if both compute the same for a few tokens."""
    sizes = module.q_proj.in_features, module.head_dim
    where: dict[str, Any] = {"dtype": dtype, "device": module.o_proj.weight.device}
    hidden, angle = (numbers(torch.empty(1, TOKENS, size, **where)) for size in sizes)
    angles = angle.cos(), angle.sin()
    given = {"hidden_states": hidden, "position_embeddings": angles, "attention_mask": None}
    try:
        with torch.inference_mode():
            with attention_hook.bound(DenseManager()):
                expected = type(module).forward(module, **given)[0]
            with attention_hook.bound(DenseManager()):
                measured = fused(hidden, angles)
    except Exception:  # noqa: BLE001  # it takes something else
        return False
    if measured.shape != expected.shape:
        return False
    error = tolerances.relative_error(measured.float(), expected.float())
    return error < tolerances.products_tolerance(dtype, isinstance(weight_of(module.o_proj), PackedRows))
