"""recall: moves and counts the same rows as stock torch operations, bit for bit, and no others.

Shapes and dtypes alternate, since bits are moved whatever they mean; the long form tests every pair.
"""

from itertools import product

import pytest
import torch
from support.grids import sampled
from support.random_kv import LAYERS, SHAPES, TOLERANCE, geometry_of, noise, sides

from kvchat.kv.memory.device_slots import EMPTY, Layout
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.modes.page_index import PageBounds
from kvchat.kv.ops.triton import recall

HALVES = [torch.float16, torch.bfloat16]


def random_ints(seed, device, low, high, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(device)


def picked(layout_heads, heads):
    return tuple((layer % heads, heads - 1) for layer in range(LAYERS)) if layout_heads and heads > 2 else None


def move_on_both(both, move):
    """Call ``move`` for each layer on both sides and compare slots and counts; returns the counts."""
    for side in both:
        side.counters = torch.tensor([3, 5], device=side.slots[0].table.device)
        for layer in range(LAYERS):
            move(side, layer)
    expected, measured = both
    assert torch.equal(measured.slots[0].kv, expected.slots[0].kv)
    assert measured.counters.tolist() == expected.counters.tolist()
    return expected.counters.tolist()


@pytest.mark.parametrize(("case", "dtype"), sampled([*product(SHAPES, (1, 5))], [*TOLERANCE]), ids=str)
def test_page_moves_match_torch(case, dtype, device):
    shape, ctas = case
    g = geometry_of(shape, dtype)
    heads = picked(ctas == 5, g.kv_heads)
    layout = Layout(0, LAYERS, 5, 20, pages=6, shared=False, heads=heads)
    both = sides(g, device, layout, tokens=16 * g.page)
    both[1].ops.ctas = ctas
    resident = random_ints(1, device, -1, 16, layout.width(g), 6)
    placed = torch.where(
        random_ints(2, device, 0, 3, *resident.shape) == 0, resident, random_ints(3, device, -1, 16, *resident.shape)
    )
    counts = move_on_both(both, lambda s, layer: s.ops.move_pages(s.slots[0], layer, placed, resident, s.counters))
    assert counts[0] > 3
    still = move_on_both(both, lambda s, layer: s.ops.move_pages(s.slots[0], layer, placed, placed, s.counters))
    assert still[0] == 3


@pytest.mark.parametrize(("shape", "dtype"), sampled(SHAPES, HALVES), ids=str)
def test_token_moves_match_torch(shape, dtype, device):
    g = geometry_of(shape, dtype)
    heads = picked(dtype is torch.float16, g.kv_heads)
    layout = Layout(0, LAYERS, 5, 100, shared=False, heads=heads)
    both = sides(g, device, layout, tokens=150)
    resident = random_ints(1, device, -1, 150, layout.width(g), 70)
    changes = random_ints(2, device, 0, 3, *resident.shape) == 0
    placed = torch.where(changes, random_ints(3, device, -1, 150, *resident.shape), resident)
    table = torch.full((layout.width(g), 100), 12, dtype=torch.int32, device=device)

    def move(side, layer):
        table[:, :70] = resident
        side.ops.move_tokens(side.slots[0], layer, 7, placed, table[:, :70], side.counters)
        assert torch.equal(table[:, :70], placed.int())
        assert bool((table[:, 70:] == 12).all())

    move_on_both(both, move)


@pytest.mark.parametrize(("shape", "dtype"), sampled(SHAPES, HALVES), ids=str)
def test_shared_token_moves_match_torch(shape, dtype, device):
    g = geometry_of(shape, dtype)
    both = sides(g, device, Layout(0, LAYERS, 0, 100, unordered=True), tokens=150)
    targets = torch.randperm(100, generator=torch.Generator().manual_seed(4))[:45].to(device)
    positions, taken = random_ints(5, device, 0, 150, 45), random_ints(6, device, 0, 2, 45) == 1
    for side in both:
        side.ops.move_shared(side.slots[0], positions, targets, taken)
    assert torch.equal(both[1].slots[0].kv, both[0].slots[0].kv)


def test_a_pageable_pool_is_left_to_torch(device, monkeypatch):
    g = geometry_of("plain", torch.float16)
    _, side = sides(g, device, Layout(0, LAYERS, 5, 20, pages=6, shared=False), tokens=60)
    monkeypatch.setattr(HostPool, "pinned", property(lambda _: False))
    monkeypatch.setattr(recall, "_move_pages", None)
    monkeypatch.setattr(recall, "_move_tokens", None)
    monkeypatch.setattr(recall, "_move_shared", None)
    monkeypatch.setattr("kvchat.kv.ops.triton.append._append", None)
    (slots,), ops = side.slots, side.ops
    ops.assign(slots, ops.position)
    ops.begin_step(ops.position)
    ops.append([slots], 0, *(noise(0, device, g.dtype, g.kv_heads, d) for d in (g.d_k, g.d_v)))
    counters, wanted = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((2, 6), dtype=torch.int64)
    ops.move_pages(slots, 0, wanted.to(device), slots.pages_of(0), counters)
    ops.move_tokens(slots, 0, 50, wanted.to(device), slots.pages_of(0), counters)
    assert counters.tolist() == [12 * g.page + 12] * 2


def test_calibration_takes_the_fewest_nearly_fastest_programs():
    assert recall.calibrate_ctas({1: 8.5, 2: 16.6, 4: 29.3, 8: 48.2, 16: 49.4, 32: 49.6}) == 8
    assert recall.calibrate_ctas({1: 5.0, 2: 5.1}) == 1


@pytest.mark.cuda
def test_recall_rates_are_measured_on_real_copies(device):
    pages, p, d = 64, 32, 128
    source = torch.randn(pages, 2, p, d).half().pin_memory()
    target = torch.zeros(2, pages, p, d, dtype=torch.float16, device=device)
    rates = recall.recall_rates(source, target)
    assert torch.equal(target.cpu(), source.transpose(0, 1))
    assert all(rate > 1e8 for rate in rates.values())
    assert recall.measured_ctas(torch.device("cuda", 0)) in recall.CTAS


def test_empty_entries_move_nothing(device):
    g = geometry_of("one", torch.bfloat16)
    _, side = sides(g, device, Layout(0, LAYERS, 5, 20, pages=2, shared=False))
    (slots,) = side.slots
    before, nothing = slots.kv.clone(), torch.full((1, 2), EMPTY, device=device)
    counters = torch.zeros(2, dtype=torch.int64, device=device)
    side.ops.move_pages(slots, 0, nothing, slots.pages_of(0), counters)
    side.ops.move_tokens(slots, 0, 0, nothing, torch.full_like(nothing, 3), counters)
    assert torch.equal(slots.kv, before)
    assert counters.tolist() == [0, 0]


# ---- append and widen: the same bytes as stock torch operations


def layouts(heads):
    """Ways to hold all KV heads of both layers."""
    yield [Layout(0, LAYERS, sink=0, window=80)]
    yield [Layout(0, LAYERS, sink=3, window=20, pages=2, shared=False)]
    yield [Layout(0, LAYERS, sink=50, window=20, pages=1, pinned=6)]
    yield [Layout(0, LAYERS, sink=0, window=64, unordered=True)]
    if heads > 1:
        one, others = ((0,), (1,)), (tuple(range(1, heads)), tuple(h for h in range(heads) if h != 1))
        yield [Layout(0, LAYERS, 0, 80, heads=one), Layout(0, LAYERS, 2, 30, 1, shared=False, heads=others)]


@pytest.mark.parametrize(("shape", "dtype"), sampled(SHAPES, [*TOLERANCE]), ids=str)
def test_new_tokens_are_written_to_slots_and_host_pool(shape, dtype, device):
    g = geometry_of(shape, dtype)
    for places in layouts(g.kv_heads):
        written = []
        for side in sides(g, device, *places, tokens=45):
            for slots in side.slots:
                slots.kv.zero_()
                side.ops.assign(slots, side.ops.position)
            for layer in range(LAYERS):
                # As the model gives them: heads next to each other, or not.
                k = noise(layer, device, dtype, 1, g.kv_heads, g.d_k + layer)[0, :, : g.d_k]
                v = noise(layer + 9, device, dtype, g.d_v, g.kv_heads).t()
                side.ops.append(side.slots, layer, k, v)
            of_slots = [each for slots in side.slots for each in (slots.kv, slots.table)]
            written.append([*side.host.layers, *of_slots])
        for expected, measured in zip(*written, strict=True):
            assert torch.equal(measured, expected)


@pytest.mark.parametrize(("shape", "dtype"), sampled(SHAPES, [*TOLERANCE]), ids=str)
def test_bounds_widen_as_in_torch(shape, dtype, device):
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
