"""weights: what modes need of one token's attention weights, computed from the logits of ``attend``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvchat.kv.attention import Weights

PARTS = 32  # joined at a time
SUMMED = 2048  # weights of one row that one program adds up
COLUMNS = 128
ROWS = 16


@triton.jit
def _best(logits, spread, best, n, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUP_ROWS)
    slot = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (g < GROUP)[:, None] & (slot < n)[None, :]
    logit = tl.load(logits + (head * GROUP + g)[:, None] * n + slot[None, :], mask=inside, other=float("-inf"))
    sum_of = tl.load(spread + head * GROUP + g, mask=g < GROUP, other=0.0)
    tl.store(best + head * n + slot, tl.max(tl.exp2(logit - sum_of[:, None]), 0), mask=slot < n)


@triton.jit
def _counted_mass(logits, spread, counted, mass, n, SUMMED: tl.constexpr):
    """Add up the weights of the counted slots in one part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = part * SUMMED + tl.arange(0, SUMMED)
    logit = tl.load(logits + row * n + slot, mask=slot < n, other=float("-inf"))
    share = tl.exp2(logit - tl.load(spread + row)) * tl.load(counted + slot, mask=slot < n, other=0.0)
    tl.store(mass + row * tl.num_programs(1) + part, tl.sum(share, 0))


@triton.jit(do_not_specialize=["rows", "parts"])
def _add_shares(
    logits, spread, mass, number, total, n, rows, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """Add the shares of all rows in a block of columns, in a fixed order, so that results are deterministic."""
    slot = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    equal = tl.load(number).to(tl.float32) / rows
    shares = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        whole = tl.zeros((ROWS,), tl.float32)
        for low in range(0, parts, PARTS):
            part = low + tl.arange(0, PARTS)
            there = (row < rows)[:, None] & (part < parts)[None, :]
            whole += tl.sum(tl.load(mass + row[:, None] * parts + part[None, :], mask=there, other=0.0), 1)
        there = (row < rows)[:, None] & (slot < n)[None, :]
        logit = tl.load(logits + row.to(tl.int64)[:, None] * n + slot[None, :], mask=there, other=float("-inf"))
        weight = tl.exp2(logit - tl.load(spread + row, mask=row < rows, other=0.0)[:, None])
        # The smallest normal float32: a row that reads no counted slot has no shares.
        shares += tl.sum(weight / tl.maximum(whole, 1.1754943508222875e-38)[:, None], 0)
    before = tl.load(total + slot, mask=slot < n, other=0.0)
    tl.store(total + slot, before + shares * equal, mask=slot < n)


class TritonWeights(Weights):
    """``Weights`` as logits ``[H, G, n]`` and their log-sum-exps ``spread [H, G]``, both base 2."""

    def __init__(self, logits: Tensor, spread: Tensor) -> None:
        self._logits = logits
        self._spread = spread

    def best(self) -> Tensor:
        """Implement ``Weights.best``."""
        heads, group, n = self._logits.shape
        best = self._logits.new_empty(heads, n)
        grid = heads, triton.cdiv(n, COLUMNS)
        shape = group, triton.next_power_of_2(group), COLUMNS
        with torch.cuda.device_of(best):
            _best[grid](self._logits, self._spread, best, n, *shape, num_warps=4)
        return best

    def add_shares(self, total: Tensor, counted: Tensor, number: Tensor) -> None:
        """Implement ``Weights.add_shares``."""
        heads, group, n = self._logits.shape
        rows, parts = heads * group, triton.cdiv(n, SUMMED)
        mass = self._logits.new_empty(rows, parts)
        sizes = n, rows, parts, ROWS, COLUMNS, PARTS
        with torch.cuda.device_of(mass):
            _counted_mass[(rows, parts)](self._logits, self._spread, counted, mass, n, SUMMED, num_warps=4)
            grid = (triton.cdiv(n, COLUMNS),)
            _add_shares[grid](self._logits, self._spread, mass, number, total, *sizes, num_warps=4)
