"""8-bit weights. On a CPU every 32 weights of a row share a float16 scale, as in GGUF's Q8_0, without a zero point.

A loop multiplies one token. torch's own int8 kernel has one scale per row, which cost a KL of 0.020 on Gemma 3 270M's
Q4_K_M. It is used for rows that cannot be divided into groups of 32, and for those of torchao's checkpoints.

On a GPU torchao packs rows with one scale each, but unpacks all of them to 16 bits for every token, which moves 5 bytes
per weight; the kernels in ``fuse.kernels`` read 1. For several tokens torchao's method is used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.models.quantize.rows import CHUNK, ROWS, Arrays, PackedRows, attach, block_loops, in_chunks

METHOD = "int8"  # transformers' name
GROUP = 32
MOST = 127
LEAST_SCALE = 2.0**-24  # float16's minimum
MULTIPLE = 32  # of columns: on some processors the kernel reads that many at once, beyond the end of a row
UNPACKED = 2**22  # weights unpacked at a time for several tokens: more would take new pages every time
ALIGNED = 64  # bytes; the kernel crashes on unaligned data if the number of rows is not a multiple of four


class Int8Rows(PackedRows):
    """An 8-bit matrix ``data [N, K]`` with ``scales [N]`` of rows, or ``[N, K / 32]`` of groups."""

    @property
    def _in_groups(self) -> bool:
        return self.scales.dtype == torch.float16

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.is_cuda:
            product = F.linear(x, self.data.to(x.dtype)) * self.scales.to(x.dtype)
            return product if bias is None else product.add_(bias)
        if x.numel() == x.shape[-1] and (found := self.one_token(x.contiguous(), bias)) is not None:
            return found
        if x.numel() == x.shape[-1] and x.shape[-1] % MULTIPLE == 0:
            # In bfloat16: the kernel's float32 variant is several times slower, and 8-bit weights round more anyway.
            row = x.reshape(1, -1).bfloat16().contiguous()
            product = torch._weight_int8pack_mm(row, self.data, self.scales.bfloat16())
            product = product.to(x.dtype).view(*x.shape[:-1], -1)
            return product if bias is None else product + bias
        products = [F.linear(x, *rows) for rows in self._unpacked(x.dtype, bias)]
        return torch.cat(products, -1) if len(products) > 1 else products[0]

    def _arrays(self) -> Arrays | None:
        if not self._in_groups:
            return None
        return self.data.detach().numpy(), self.scales.view(torch.uint16).numpy()

    def _unpacked(self, dtype: torch.dtype, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield runs of rows in ``dtype``, each with its part of ``bias [N]``."""
        at = 0
        for rows in in_chunks(self.data, UNPACKED):
            here = slice(at, at := at + len(rows))
            groups = rows.to(dtype).view(len(rows), -1, GROUP if self._in_groups else rows.shape[1])
            scales = self.scales[here].to(dtype).view(len(rows), -1, 1)
            yield groups.mul_(scales).view(rows.shape), None if bias is None else bias[here]

    def some(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows ``numbers [n]`` as ``[n, K]``."""
        scales = self.scales[numbers].float().view(len(numbers), -1, 1)
        return (self.data[numbers].view(len(numbers), scales.shape[1], -1) * scales).view(len(numbers), -1).to(dtype)

    @property
    def mergeable(self) -> bool:
        return self.data.nbytes % ALIGNED == 0


def pack(linear: nn.Linear, *, of_4_bits: bool = False) -> None:
    """Quantize a Linear; ``of_4_bits`` makes no difference."""
    weight = linear.weight.detach()
    install(linear, *packed((weight,), weight.shape))


def packed(parts: Iterable[Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Quantize a matrix of this shape, whose rows come in ``parts``, to ``data [N, K]`` and scales."""
    data, scales, at = torch.empty(shape, dtype=torch.int8), [], 0
    for rows in parts:
        scales.append(_quantize(rows, data[at : at + len(rows)]))
        at += len(rows)
    return data, torch.cat(scales)


def stack(matrices: Tensor, *, of_4_bits: bool = False) -> Int8Rows:
    """Quantize a stack of ``matrices [E, N, K]`` that ``fits_stack``; ``of_4_bits`` makes no difference."""
    data = torch.empty(matrices.shape, dtype=torch.int8)
    return Int8Rows(data, torch.stack([_quantize(*pair) for pair in zip(matrices, data, strict=True)]))


def fits_stack(rows: int, columns: int) -> bool:
    """Return True if each matrix of a stack is aligned as the kernel requires."""
    return rows * columns % ALIGNED == 0


def install(linear: nn.Linear, data: Tensor, scale: Tensor) -> None:
    """Make a Linear multiply by 8-bit ``data [N, K]`` with a ``scale [N]`` per row."""
    if data.data_ptr() % ALIGNED:  # true for a mapped file
        data = data.clone()
    linear.weight = nn.Parameter(data, requires_grad=False)
    attach(linear, Int8Rows(linear.weight, scale, linear.bias))


def look_up(embeddings: nn.Embedding, head: nn.Linear) -> None:
    """Make ``embeddings`` that shared the weight of a ``head`` look up tokens in the head's packed rows.

    Their own forward, which may do more, runs on a table of only these rows.
    """
    dtype, forward = embeddings.weight.dtype, type(embeddings).forward
    table = copy.copy(embeddings)
    table._parameters, table.padding_idx = {}, None

    def look_up(ids: Tensor) -> Tensor:
        rows: Int8Rows = head.__dict__[ROWS]
        table.weight = rows.some(ids.flatten(), dtype)
        embedded: Tensor = forward(table, torch.arange(ids.numel(), device=ids.device).view(ids.shape))
        return embedded

    embeddings.weight = head.weight
    embeddings.__dict__["forward"] = look_up


def _quantize(weight: Tensor, data: Tensor) -> Tensor:
    """Quantize ``weight [N, K]`` into ``data [N, K]``; return the scales, ``[N, K / 32]`` or ``[N]``."""
    in_groups = weight.shape[1] % GROUP == 0 and block_loops() is not None
    chunk = _quantize_groups if in_groups else _quantize_rows
    pairs = zip(in_chunks(weight, CHUNK), in_chunks(data, CHUNK), strict=True)
    return torch.cat([chunk(rows, place) for rows, place in pairs])


def _quantize_groups(weight: Tensor, data: Tensor) -> Tensor:
    groups = weight.float().view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1) / MOST).half().clamp(min=LEAST_SCALE)
    levels = (groups / scale.float()[..., None]).round_().clamp_(-MOST, MOST)
    data.copy_(levels.view(weight.shape))
    return scale


def _quantize_rows(weight: Tensor, data: Tensor) -> Tensor:
    weight = weight.float()
    scale = (weight.abs().amax(1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    data.copy_((weight / scale[:, None]).round())
    return scale
