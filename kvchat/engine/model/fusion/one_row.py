"""Products with a matrix on a CPU: with one row, which decoding a token mostly is, and with many in bfloat16.

Intel's MKL, which torch multiplies float32 with on x86, reads a matrix at a third of the memory's speed for one row on
a processor of another make: on an AMD EPYC 384 x 8,192 take 1.2 ms on one thread and on two. Its batched product of
blocks of rows does not: 0.33 ms on one thread, 0.25 on two. The processor's make decides and not a measurement, so that
the same conversation has the same last bits every time.

bfloat16 torch multiplies with oneDNN where the processor has AVX-512, for one row at a third to a half of the memory's
speed. torch's own product reads at all of it: there 8,192 x 2,048 take 0.95 ms instead of 1.75, and 1.8 in float32.
Without AVX-512 many rows in bfloat16 are slow instead: 512 of them take 368 ms, 122 as float32 with the matrix widened
for them, 100 with one that is stored so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine.model.packed_rows import PackedRows, Weight

PROCESSOR = Path("/proc/cpuinfo")
MAKE = "AuthenticAMD"
# Fewer are slower (one is the slow product itself), more only where there are more threads.
BLOCKS = 4
MANY = 32  # rows from which on widening a matrix takes less than what it saves


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]`` through ``weight [N, K]``, plus ``bias [N]``: ``[..., N]``."""
    if isinstance(weight, PackedRows):
        return weight.multiply(x, bias)
    if is_one_row(x) and weight.dtype == torch.float32 and weight.device.type == "cpu" and in_blocks():
        blocks = _blocks(weight.shape[0])
        if blocks > 1 and weight.is_contiguous():
            return _by_blocks(x, weight, bias, blocks)
    if x.numel() >= MANY * x.shape[-1] and widens(weight.dtype, weight.device):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def widens(dtype: torch.dtype, device: torch.device) -> bool:
    """True if many rows are multiplied as float32: in bfloat16 on a processor that oneDNN has no product for."""
    return dtype == torch.bfloat16 and device.type == "cpu" and not _has_bfloat16()


@cache
def _has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def without_onednn(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let torch multiply single rows of bfloat16 by its own product on a CPU, in all of the process."""
    onednn: Any = torch.backends.mkldnn  # typed as what makes its properties
    enabled = onednn.enabled
    onednn.enabled = enabled and not (dtype == torch.bfloat16 and device.type == "cpu")
    try:
        yield
    finally:
        onednn.enabled = enabled


def is_one_row(x: Tensor) -> bool:
    """True if ``x [..., K]`` is one contiguous row: a single token's."""
    return x.numel() == x.shape[-1] and x.is_contiguous()


@cache
def in_blocks(processor: Path = PROCESSOR) -> bool:
    """True if multiplying in blocks of rows is faster on this processor."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        return MAKE in processor.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
    size = x.shape[-1]
    # The row as every block's column; made one by ``view(size, 1)`` it would be ten times as slow.
    column = x.as_strided((blocks, size, 1), (0, 1, size))
    product = torch.bmm(weight.view(blocks, -1, size), column).view(*x.shape[:-1], -1)
    return product if bias is None else product.add_(bias)


@cache
def _blocks(rows: int) -> int:
    """Number of blocks: as many as threads, at least ``BLOCKS``; 1 where that number does not divide ``rows``."""
    blocks = BLOCKS
    while blocks < torch.get_num_threads():
        blocks *= 2
    while blocks > 1 and rows % blocks:
        blocks //= 2
    return blocks
