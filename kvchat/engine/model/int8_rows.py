"""Weights of 8 bits on a CPU, where one token is multiplied by torch's own int8 kernel.

torchao's tensors multiply by unpacking all weights first there, which takes longer than float weights do. They stay in
the model and hold the numbers; ``Int8Rows`` is what multiplies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.engine.model.packed_rows import ROWS, PackedRows, attach


class Int8Rows(PackedRows):
    """A matrix ``data [N, K]`` of 8 bits, each row with its ``scale [N]``; ``bias [N]`` is its Linear's."""

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.data, self.scale, self.bias = data, scale, bias
        self._rounded = scale.bfloat16()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., K]`` through the matrix, plus ``bias [N]``: ``[..., N]``."""
        if x.numel() == x.shape[-1]:
            # In bfloat16: the kernel's float32 variant is several times slower, and 8 bits of weight round more.
            product = torch._weight_int8pack_mm(x.reshape(1, -1).bfloat16(), self.data, self._rounded)
            product = product.to(x.dtype).view(*x.shape[:-1], -1)
            return product if bias is None else product + bias
        return F.linear(x, self.data.to(x.dtype) * self.scale.to(x.dtype)[:, None], bias)

    @classmethod
    def merged(cls, linears: Sequence[Any]) -> Self:
        """The rows of several Linears as one matrix; theirs become views of it, so no memory is added."""
        parts: list[Int8Rows] = [linear.__dict__[ROWS] for linear in linears]
        merged = cls(torch.cat([part.data for part in parts]), torch.cat([part.scale for part in parts]))
        views = torch.split(merged.data, [len(part.data) for part in parts])
        for linear, part, view in zip(linears, parts, views, strict=True):
            part.data = linear.weight.qdata = view
        return merged


def install(linear: nn.Linear) -> None:
    """Let a Linear of torchao's int8 weights multiply by its rows."""
    weight: Any = linear.weight
    attach(linear, Int8Rows(weight.qdata, weight.scale.flatten(), linear.bias))
