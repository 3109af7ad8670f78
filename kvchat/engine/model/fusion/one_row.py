"""A matrix times one row on a CPU: what decoding a token mostly is.

Intel's MKL, which torch multiplies float32 with on x86, reads a matrix at a third of the memory's speed for one row on
a processor of another make: on an AMD EPYC 384 x 8,192 take 1.2 ms on one thread and on two. Its batched product of
blocks of rows does not: 0.33 ms on one thread, 0.25 on two. The processor's make decides and not a measurement, so that
the same conversation has the same last bits every time.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvchat.engine.model.packed_rows import PackedRows, Weight

PROCESSOR = Path("/proc/cpuinfo")
MAKE = "AuthenticAMD"
# Fewer are slower (one is the slow product itself), more only where there are more threads.
BLOCKS = 4


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x [..., K]`` through ``weight [N, K]``, plus ``bias [N]``: ``[..., N]``."""
    if isinstance(weight, PackedRows):
        return weight.multiply(x, bias)
    if is_one_row(x) and weight.dtype == torch.float32 and weight.device.type == "cpu" and in_blocks():
        blocks = _blocks(weight.shape[0])
        if blocks > 1 and weight.is_contiguous():
            return _by_blocks(x, weight, bias, blocks)
    return F.linear(x, weight, bias)


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
