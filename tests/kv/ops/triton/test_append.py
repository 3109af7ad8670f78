"""append and widen: what stock torch operations write, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.random_kv import LAYERS, SHAPES, TOLERANCE, geometry_of, noise, sides

from kvchat.kv.memory.device_slots import Layout
from kvchat.kv.modes.page_index import PageBounds


def layouts(heads):
    """Each a way to hold all KV heads of both layers."""
    yield [Layout(0, LAYERS, sink=0, window=80)]
    yield [Layout(0, LAYERS, sink=3, window=20, pages=2, shared=False)]
    yield [Layout(0, LAYERS, sink=0, window=64, unordered=True)]
    if heads > 1:
        some, others = ((0,), (1,)), (tuple(range(1, heads)), tuple(h for h in range(heads) if h != 1))
        yield [Layout(0, LAYERS, 0, 80, heads=some), Layout(0, LAYERS, 2, 30, 1, shared=False, heads=others)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_new_token_goes_to_its_slots_and_to_the_host_pool(shape, dtype, device):
    g = geometry_of(shape, dtype)
    for places in layouts(g.kv_heads):
        written = []
        for side in sides(g, device, *places, tokens=45):
            for slots in side.slots:
                slots.kv.zero_()
                slots.assign(side.ops.position)
            for layer in range(LAYERS):
                # As the model gives them: heads beside each other, or not.
                k = noise(layer, device, dtype, 1, g.kv_heads, g.d_k + layer)[0, :, : g.d_k]
                v = noise(layer + 9, device, dtype, g.d_v, g.kv_heads).t()
                side.ops.append(side.slots, layer, k, v)
            written.append([*side.host.layers, *(slots.kv for slots in side.slots)])
        for expected, measured in zip(*written, strict=True):
            assert torch.equal(measured, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_widen(shape, dtype, device):
    g = geometry_of(shape, dtype)
    expected, measured = (PageBounds(g, device) for _ in range(2))
    ops = sides(g, device)
    for side, bounds in zip(ops, (expected, measured), strict=True):
        bounds.reserve(100)
        for token, page in enumerate((0, 3, 3, 1, 3)):
            keys = noise(token, device, dtype, g.kv_heads, g.d_k)
            side.ops.update_bounds(bounds.of(1), torch.tensor([page], device=device), keys)
    assert torch.equal(measured.data, expected.data)
    assert bool((measured.of(1)[:, 3] > -100).all())
