"""Pairs of device slots over the same random K/V: one with torch's ops, one with the Triton kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import torch
from support.grids import WHOLE, sampled
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops.torch_ops import TorchOps
from kvchat.kv.ops.triton_ops import TritonOps

LAYERS = 2
# float32 runs in Triton's interpreter only, where only the order of sums differs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = {
    "plain": {"heads": 2, "group": 2, "d_k": 32, "d_v": 32, "page": 8},
    "one": {"heads": 1, "group": 1, "d_k": 16, "d_v": 16, "page": 32},
    "wide": {"heads": 2, "group": 5, "d_k": 128, "d_v": 128, "page": 32},
    "odd": {"heads": 3, "group": 8, "d_k": 80, "d_v": 48, "page": 8},
    "many": {"heads": 8, "group": 1, "d_k": 24, "d_v": 96, "page": 8},
}

# Of today's models: query heads per KV head, elements per head, dtypes.
GROUPS, WIDTHS, DTYPES = (1, 4, 7, 8), (64, 80, 96, 128, 256), (torch.float16, torch.bfloat16)
# Ten of the forty cells, in which every width and every group meets both dtypes.
CELLS = [(group, d, dtype) for (dtype, d), group in sampled(product(DTYPES, WIDTHS), GROUPS)]
# Three of them for the kernels over plain pages, and two others over 8-bit ones; all in the long form.
PLAIN_CELLS, ROUNDED_CELLS = (CELLS, CELLS) if WHOLE else (CELLS[1::4], CELLS[::8])


def geometry_of(shape: str, dtype: torch.dtype) -> Geometry:
    s = SHAPES[shape]
    return Geometry(LAYERS, s["heads"] * s["group"], s["heads"], s["d_k"], s["d_v"], dtype, s["page"])


@dataclass
class Side:
    """A host pool, slots of each layout, and the ops for them."""

    ops: TorchOps
    host: HostPool
    slots: list[DeviceSlots]


def sides(
    g: Geometry, device: torch.device, *layouts: Layout, tokens: int = 150, seed: int = 0, exact: bool = False
) -> tuple[Side, Side]:
    """Return sides with the same K/V for torch's ops and for the kernels; ``exact`` computes the former in float32."""
    single = Geometry(g.layers, g.q_heads, g.kv_heads, g.d_k, g.d_v, torch.float32, g.page)
    expected = _side(single if exact else g, g.dtype, device, layouts, tokens, seed, TorchOps)
    measured = _side(g, g.dtype, device, layouts, tokens, seed, TritonOps)
    measured.ops.ctas, measured.ops.programs = 3, 5
    return expected, measured


def noise(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def fill_table(slots: DeviceSlots, tokens: int, seed: int, share: float = 0.7) -> None:
    """Put distinct random tokens into a ``share`` of each table's slots."""
    dice = random.Random(seed)
    for row in slots.table.view(-1, slots.n):
        held = min(tokens, int(share * slots.n))
        where = torch.tensor(dice.sample(range(slots.n), held), device=row.device)
        row.fill_(EMPTY)
        row[where] = torch.tensor(dice.sample(range(tokens), held), dtype=torch.int32, device=row.device)


def assert_near(measured: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare within the rounding of ``dtype``, relative to the largest expected element or 1."""
    assert measured.shape == expected.shape
    assert bool(measured.isfinite().all())
    error = (measured.float() - expected.float()).abs().max()
    assert error <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max())), f"off by {float(error):.3g}"


def _side(g, rounded, device, layouts, tokens, seed, kind) -> Side:
    host = HostPool(g, device)
    host.reserve(tokens + 1)
    for layer in range(g.layers):
        k = noise(seed + layer, device, rounded, g.kv_heads, tokens, g.d_k).to(g.dtype)
        v = noise(seed + layer + 50, device, rounded, g.kv_heads, tokens, g.d_v).to(g.dtype)
        host.append(layer, 0, k, v)
    host.total = tokens
    slots = [DeviceSlots(layout, g, device) for layout in layouts]
    for i, each in enumerate(slots):
        each.kv.copy_(noise(seed + 90 + i, device, rounded, *each.kv.shape))
        fill_table(each, tokens, seed)
    ops = kind(g, host, device)
    ops.begin_step(torch.tensor(tokens, device=device))
    return Side(ops, host, slots)
