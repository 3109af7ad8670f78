"""Weights of 8 bits on a CPU, where one token is multiplied by torch's own int8 kernel.

Each row has a scale in float32 and no zero point, as torchao's have, whose own tensors multiply by unpacking all
weights first: that takes longer than float weights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.engine.model.merging import merge
from kvchat.engine.model.packed_rows import CHUNK, ROWS, PackedRows, attach, in_chunks

METHOD = "int8"  # transformers' name of it
SCALE_BYTES = 4 + 2  # a row: in float32, and in bfloat16 for the kernel
MOST = 127
MULTIPLE = 32  # of columns: on some processors the kernel reads so many at once, and past the end of a row
UNPACKED = 2**22  # weights that several tokens are multiplied by at once: more would be new pages every time
ALIGNED = 64  # bytes: of rows that are no multiple of four the kernel reads the last ones so, or ends the process


class Int8Rows(PackedRows):
    """A matrix ``data [N, K]`` of 8 bits, each row with its ``scale [N]``; ``bias [N]`` is its Linear's.

    ``rounded`` are the scales as the kernel reads them.
    """

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None = None, rounded: Tensor | None = None) -> None:
        self.data, self.scale, self.bias = data, scale, bias
        self._rounded = scale.bfloat16() if rounded is None else rounded

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., K]`` through the matrix, plus ``bias [N]``: ``[..., N]``."""
        if x.numel() == x.shape[-1] and x.shape[-1] % MULTIPLE == 0:
            # In bfloat16: the kernel's float32 variant is several times slower, and 8 bits of weight round more.
            row = x.reshape(1, -1).bfloat16().contiguous()
            product = torch._weight_int8pack_mm(row, self.data, self._rounded)
            product = product.to(x.dtype).view(*x.shape[:-1], -1)
            return product if bias is None else product + bias
        products = [F.linear(x, *rows) for rows in self._unpacked(x.dtype, bias)]
        return torch.cat(products, -1) if len(products) > 1 else products[0]

    def _unpacked(self, dtype: torch.dtype, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Runs of rows in ``dtype``, each with its part of ``bias [N]``."""
        at = 0
        for rows in in_chunks(self.data, UNPACKED):
            here = slice(at, at := at + len(rows))
            yield rows.to(dtype).mul_(self.scale[here, None].to(dtype)), None if bias is None else bias[here]

    def matrix(self, index: int) -> Self:
        """One matrix of a stack ``[E, N, K]``, in the same memory."""
        return type(self)(self.data[index], self.scale[index], rounded=self._rounded[index])

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The scales, and those rounded for the kernel."""
        return self.scale, self._rounded

    @property
    def mergeable(self) -> bool:
        """True if rows of another matrix can follow these."""
        return self.data.nbytes % ALIGNED == 0

    @classmethod
    def merged(cls, linears: Sequence[Any]) -> Self:
        """The rows of several Linears as one matrix; theirs become views of it, so no memory is added."""
        parts: list[Int8Rows] = [linear.__dict__[ROWS] for linear in linears]
        merged = cls(merge([part.data for part in parts]), torch.cat([part.scale for part in parts]))
        views = (torch.split(constant, [len(part.data) for part in parts]) for constant in merged.constants)
        for part, scale, rounded in zip(parts, *views, strict=True):
            part.scale, part._rounded = scale, rounded
        return merged


def pack(linear: nn.Linear, *, of_4_bits: bool = False) -> None:
    """Quantize a Linear, also one whose weights had 4 bits."""
    weight = linear.weight.detach()
    data = torch.empty(weight.shape, dtype=torch.int8)
    install(linear, data, _quantize(weight, data))


def stack(matrices: Tensor, *, of_4_bits: bool = False) -> Int8Rows:
    """Quantize a stack of ``matrices [E, N, K]`` that ``fits_stack``, also of weights that had 4 bits."""
    data = torch.empty(matrices.shape, dtype=torch.int8)
    return Int8Rows(data, torch.stack([_quantize(*pair) for pair in zip(matrices, data, strict=True)]))


def fits_stack(rows: int, columns: int) -> bool:
    """True if each matrix of a stack of such can lie as the kernel reads it."""
    return rows * columns % ALIGNED == 0


def install(linear: nn.Linear, data: Tensor, scale: Tensor) -> None:
    """Let a Linear multiply by ``data [N, K]`` of 8 bits, each row with its ``scale [N]``."""
    if data.data_ptr() % ALIGNED:  # as it lies in a file
        data = data.clone()
    linear.weight = nn.Parameter(data, requires_grad=False)
    attach(linear, Int8Rows(linear.weight, scale, linear.bias))


def _quantize(weight: Tensor, data: Tensor) -> Tensor:
    """Write the ``data [N, K]`` of ``weight [N, K]``; the ``scale [N]`` of each row."""
    pairs = zip(in_chunks(weight, CHUNK), in_chunks(data, CHUNK), strict=True)
    return torch.cat([_quantize_chunk(rows, place) for rows, place in pairs])


def _quantize_chunk(weight: Tensor, data: Tensor) -> Tensor:
    weight = weight.float()
    scale = (weight.abs().amax(1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    data.copy_((weight / scale[:, None]).round())
    return scale
