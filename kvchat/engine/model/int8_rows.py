"""Weights of 8 bits on a CPU, where one token is multiplied by torch's own int8 kernel.

Each row has a scale in float32 and no zero point, as torchao's have, whose own tensors multiply by unpacking all
weights first: that takes longer than float weights do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.engine.model.merging import merge
from kvchat.engine.model.packed_rows import CHUNK, ROWS, PackedRows, attach

METHOD = "int8"  # transformers' name of it
SCALE_BYTES = 4  # a row
MOST = 127
MULTIPLE = 32  # of columns: on some processors the kernel reads so many at once, and past the end of a row
ALIGNED = 64  # bytes: of rows that are no multiple of four the kernel reads the last ones so, or ends the process


class Int8Rows(PackedRows):
    """A matrix ``data [N, K]`` of 8 bits, each row with its ``scale [N]``; ``bias [N]`` is its Linear's."""

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        self.data, self.scale, self.bias = data, scale, bias
        self._rounded = scale.bfloat16()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., K]`` through the matrix, plus ``bias [N]``: ``[..., N]``."""
        if x.numel() == x.shape[-1] and x.shape[-1] % MULTIPLE == 0:
            # In bfloat16: the kernel's float32 variant is several times slower, and 8 bits of weight round more.
            product = torch._weight_int8pack_mm(x.reshape(1, -1).bfloat16(), self.data, self._rounded)
            product = product.to(x.dtype).view(*x.shape[:-1], -1)
            return product if bias is None else product + bias
        return F.linear(x, self.data.to(x.dtype) * self.scale.to(x.dtype)[:, None], bias)

    @property
    def mergeable(self) -> bool:
        """True if rows of another matrix can follow these."""
        return self.data.nbytes % ALIGNED == 0

    @classmethod
    def merged(cls, linears: Sequence[Any]) -> Self:
        """The rows of several Linears as one matrix; theirs become views of it, so no memory is added."""
        parts: list[Int8Rows] = [linear.__dict__[ROWS] for linear in linears]
        return cls(merge([part.data for part in parts]), torch.cat([part.scale for part in parts]))


def pack(linear: nn.Linear) -> None:
    """Quantize a Linear."""
    chunks = [_packed(rows) for rows in torch.split(linear.weight.detach(), CHUNK)]
    install(linear, torch.cat([data for data, _ in chunks]), torch.cat([scale for _, scale in chunks]))


def install(linear: nn.Linear, data: Tensor, scale: Tensor) -> None:
    """Let a Linear multiply by ``data [N, K]`` of 8 bits, each row with its ``scale [N]``."""
    if data.data_ptr() % ALIGNED:  # as it lies in a file
        data = data.clone()
    linear.weight = nn.Parameter(data, requires_grad=False)
    linear.register_buffer("scale", scale, persistent=False)
    attach(linear, Int8Rows(linear.weight, scale, linear.bias))


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The ``data`` and ``scale`` of ``weight [N, K]``."""
    weight = weight.float()
    scale = (weight.abs().amax(1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scale[:, None]).round().to(torch.int8), scale
