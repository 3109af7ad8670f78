"""What the kernels share: constants, and the few expressions of Triton's language that all of them need."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# What older versions do anyway: a * b + c is rounded once. Left open, Triton 3.9 warns on the user's terminal.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: the difference of two infinities is no number.
LOWEST = tl.constexpr(-1e30)
SMALLEST_DOT = 16


def padded(size: int) -> int:
    """The size of a block that holds ``size`` elements and may be an operand of a matrix product."""
    return max(SMALLEST_DOT, int(triton.next_power_of_2(size)))


@triton.jit
def operand(x):
    """``x`` as a matrix product takes it; Triton's interpreter multiplies bfloat16 as integers."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def host_row(position, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """``HostPool.row_index``, int64."""
    return ((position // PAGE).to(tl.int64) * KV_HEADS + head) * (2 * PAGE) + position % PAGE
