"""4-bit weights: on a CPU in the layout of torch's int4 kernel, which multiplies several tokens; a loop does one.

Every 32 weights of a row share a scale and a zero point in bfloat16: 5 bits per weight. KL to the unquantized bundled
model (1,200 tokens of a novel): 0.48 with groups of 32, 0.65 with 64 (4.5 bits), 0.69 with 128 (4.25 bits); with
float32 scales 0.47 (6 bits).

On a GPU torchao packs the weights in tiles. kvchat takes them out of torchao's tensors, to merge several Linears and to
avoid copying a row that needs no padding for each product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.kv.ops.cpu_ops import use_threads
from kvchat.models.quantize.rows import (
    BLOCK,
    STACKS,
    Arrays,
    PackedRows,
    attach,
    block_loops,
    body,
    in_chunks,
    product_loops,
)

METHOD = "int4"  # transformers' name
GROUP = 32
MULTIPLE = 16  # of rows, required by the kernel
LEVELS = 15  # besides 0
TILE_COLUMNS = 128
CHUNK = 2**21  # weights quantized at a time: their 32-bit levels take several times the memory
NARROW = 16  # bytes per column if torch's kernel uses only AVX2; many tokens then take twice as long as in float32
MANY = 48  # fewest tokens for which unpacking a matrix beats the narrow kernel
UNPACKED = 2**22  # weights unpacked at a time
FEWEST_LEVELS = 8  # fewest steps that 32 weights of a 4-bit file span
NEAR_LEVEL = 0.1  # of a step: rounding to bfloat16. 30 values are never that close to steps by chance


class Int4Rows(PackedRows):
    """A matrix ``[N, K]`` packed as ``data [N, K / 2]``; ``scales [K / 32, N, 2]`` hold each group's scale and zero.

    A weight is ``(level - 8) * scale + zero`` with a level from 0 to 15.
    """

    of_rows = 1

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.numel() == x.shape[-1] and (found := self.one_token(x.contiguous(), bias)) is not None:
            return found
        if x.numel() >= MANY * x.shape[-1] and column_bytes() == NARROW and len(self.data) % (2 * NARROW) == 0:
            products = [F.linear(x.float(), rows) for rows in self._unpacked()]
            whole = (torch.cat(products, -1) if len(products) > 1 else products[0]).to(x.dtype)
            return whole if bias is None else whole + bias
        # In bfloat16: in float32 or float16 the kernel is 10 to 40 times slower, and 4-bit weights round more anyway.
        rows, scales = x.reshape(-1, x.shape[-1]).bfloat16().contiguous(), self.scales.contiguous()
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.data, GROUP, scales)
        product = product.to(x.dtype).view(*x.shape[:-1], len(self.data))
        return product if bias is None else product + bias

    def _arrays(self) -> Arrays | None:
        width = column_bytes()
        if not width or len(self.data) % (2 * width):
            return None
        data = self.data.detach().view(torch.uint8).numpy()
        return data, self.scales.detach().contiguous().view(torch.int32).squeeze(-1).numpy(), width

    def _unpacked(self) -> Iterator[Tensor]:
        """Yield runs of rows in float32."""
        loops, columns = product_loops(), 2 * self.data.shape[1]
        assert loops is not None
        use_threads(torch.get_num_threads())
        many = max(1, UNPACKED // (BLOCK * columns)) * BLOCK
        for data, scales in zip(torch.split(self.data, many), torch.split(self.scales, many, 1), strict=True):
            rows = torch.empty(len(data), columns)
            arrays = data.detach().view(torch.uint8).numpy(), scales.detach().float().contiguous().numpy()
            loops.unpack_four_bits(*arrays, NARROW, rows.numpy())
            yield rows

    @property
    def mergeable(self) -> bool:
        return len(self.data) % BLOCK == 0


class Int4Tiles(Int4Rows):
    """A matrix on a GPU in tiles ``data [N / 8, K / 128, 32, 4]`` of int32, K padded; ``scales [K / group, N, 2]``."""

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, columns = x.reshape(-1, x.shape[-1]).bfloat16().contiguous(), TILE_COLUMNS * self.data.shape[1]
        if columns > x.shape[-1]:
            rows = F.pad(rows, (0, columns - x.shape[-1]))
        group, scales = columns // len(self.scales), self.scales.contiguous()
        product: Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.data, group, scales)
        product = product.to(x.dtype).view(*x.shape[:-1], -1)
        return product if bias is None else product.add_(bias)

    @property
    def mergeable(self) -> bool:
        return True


@cache
def column_bytes() -> int:
    """Return the bytes per column in torch's blocks on this processor; 0 if ``product_loops`` cannot read them."""
    if product_loops() is None:
        return 0
    levels = torch.randint(LEVELS + 1, (BLOCK, GROUP), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1).view(torch.uint8).flatten()
    for width in (16, 32):
        lower, upper = levels.view(-1, 2, width, GROUP).transpose(2, 3).unbind(1)
        if torch.equal(packed, (lower | upper << 4).to(torch.uint8).flatten()):
            return width
    return 0


def chosen(model: Any) -> Iterator[nn.Linear]:
    """Return the Linears of ``model`` to pack: all that fit, except its head."""
    return (linear for linear in body(model) if fits(*linear.weight.shape))


def fits(rows: int, columns: int) -> bool:
    """Return True if the kernel multiplies a matrix of this shape."""
    return rows % MULTIPLE == 0 and columns % GROUP == 0


def pack(linear: nn.Linear, *, of_4_bits: bool = False) -> None:
    """Quantize a Linear that ``fits``; weights that had 4 bits (``of_4_bits``) keep their values if possible."""
    data, scales = _quantize(linear.weight.detach(), of_4_bits)
    linear.weight = nn.Parameter(data, requires_grad=False)
    attach(linear, Int4Rows(linear.weight, scales, linear.bias))


def install_tiles(linear: nn.Linear) -> None:
    """Make a Linear multiply by the tiles of its torchao tensor, unless its rows are padded."""
    weight: Any = linear.weight
    if weight.scale_and_zero.shape[1] == linear.out_features:
        linear.weight = nn.Parameter(weight.qdata, requires_grad=False)
        attach(linear, Int4Tiles(linear.weight, weight.scale_and_zero, linear.bias))


def stack(matrices: Tensor, *, of_4_bits: bool = False) -> Int4Rows:
    """Quantize a stack of ``matrices [E, N, K]`` whose shape fits."""
    data, scales = zip(*(_quantize(matrix, of_4_bits) for matrix in matrices), strict=True)
    return Int4Rows(torch.stack(data), torch.stack(scales))


def unpacked_elements(model: Any) -> int:
    """Return the number of weights in ``model``; two packed in a byte count as two."""
    hidden = (linear.in_features * linear.out_features - linear.weight.numel() for linear in body(model))
    stacks = (rows for module in model.modules() for rows in module.__dict__.get(STACKS, {}).values())
    stacked = (rows.data.numel() for rows in stacks if isinstance(rows, Int4Rows))
    return int(model.num_parameters()) + sum(hidden) + sum(stacked)


def _quantize(weight: Tensor, of_4_bits: bool) -> tuple[Tensor, Tensor]:
    """Quantize ``weight [N, K]`` into ``data`` and ``scales``."""
    quantize = partial(_quantize_by_loops, loops) if (loops := block_loops()) else quantize_by_torch
    chunks = [quantize(rows, of_4_bits) for rows in in_chunks(weight, CHUNK)]
    return torch.cat([data for data, _ in chunks]), torch.cat([scales for _, scales in chunks], 1)


def _quantize_by_loops(loops: Any, weight: Tensor, of_4_bits: bool) -> tuple[Tensor, Tensor]:
    """Compute the same bits as ``quantize_by_torch``."""
    groups = weight.float().contiguous().view(-1, GROUP)
    low, step = torch.empty(2, len(groups))
    levels = torch.empty(weight.shape, dtype=torch.int32)
    fewest = FEWEST_LEVELS if of_4_bits else LEVELS + 1
    values, out = groups.numpy(), levels.view(-1, GROUP).numpy()
    loops.in_threads(
        len(groups),
        lambda part: loops.ranges(values[part], LEVELS, fewest, NEAR_LEVEL, low[part].numpy(), step[part].numpy()),
    )
    scale = step.bfloat16().float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    zero = (low + 8 * scale).bfloat16().float()
    loops.in_threads(
        len(groups),
        lambda part: loops.levels(values[part], scale[part].numpy(), zero[part].numpy(), 8, LEVELS, out[part]),
    )
    scales = torch.stack([scale, zero], -1).bfloat16().view(len(weight), -1, 2).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), scales


def quantize_by_torch(weight: Tensor, of_4_bits: bool) -> tuple[Tensor, Tensor]:
    """Quantize ``weight [N, K]`` into ``data`` and ``scales``."""
    groups = weight.float().reshape(-1, GROUP)
    low, span = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    steps = _steps(groups, low, span) if of_4_bits else LEVELS
    scale = (span / steps).bfloat16().float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    zero = (low + 8 * scale).bfloat16().float()
    levels = ((groups - zero) / scale + 8).round().clamp(0, LEVELS).to(torch.int32).view(weight.shape)
    scales = torch.cat([scale, zero], -1).bfloat16().view(len(weight), -1, 2).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), scales


def _steps(groups: Tensor, low: Tensor, span: Tensor) -> Tensor:
    """Return the largest number of equal steps that each group's values fit; 15 if they fit none."""
    steps = torch.full_like(span, LEVELS)
    left = torch.arange(len(groups))
    for count in range(LEVELS, FEWEST_LEVELS - 1, -1):
        levels = (groups[left] - low[left]) / span[left] * count
        fits_all = (levels - levels.round()).abs().amax(-1) < NEAR_LEVEL
        steps[left[fits_all]] = count
        left = left[~fits_all]
    return steps
