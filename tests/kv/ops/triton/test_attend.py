"""attend: compared with stock torch operations in float32 for every stored dtype."""

import dataclasses

import pytest
import torch
from support.grids import WHOLE, sampled
from support.random_kv import LAYERS, SHAPES, assert_near, fill_table, geometry_of, noise, sides

from kvchat.kv.attention import AttentionSpec
from kvchat.kv.memory.device_slots import EMPTY, Layout

KINDS = {
    "plain": {},
    "window": {"window": 60},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 60, "softcap": 2.0, "sinks": True},
}
TOKENS = 150


def spec_of(kind, g, device):
    extra = dict(KINDS[kind])
    if "sinks" in extra:
        extra["sinks"] = noise(7, device, g.dtype, g.q_heads)
    return AttentionSpec(g.d_k**-0.5, **extra)


def layouts(heads):
    shared, own = Layout(0, LAYERS, 0, 150), Layout(0, LAYERS, 9, 30, pages=3, shared=False)
    some = tuple(tuple(sorted({layer % heads, heads - 1})) for layer in range(LAYERS)) if heads > 2 else ((0,),) * 2
    return [shared, own, *(dataclasses.replace(layout, heads=some) for layout in (shared, own))]


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        *((shape, "all", dtype) for shape, dtype in sampled(SHAPES, (torch.float32, torch.bfloat16))),
        *(("plain", kind, torch.float16) for kind in KINDS),
    ],
    ids=str,
)
def test_outputs_weights_and_read_counts_match_torch(shape, kind, dtype, device):
    if dtype is torch.float32 and device.type == "cuda":
        pytest.skip("the GPU's matrix products round float32")
    g = geometry_of(shape, dtype)
    shared, own, *picked = layouts(g.kv_heads)
    for seed, layout in enumerate([shared, own, *picked] if shape == "plain" else [shared, picked[1]]):
        query = noise(seed, device, dtype, g.q_heads, g.d_k)
        found = []
        for side in sides(g, device, layout, tokens=TOKENS, seed=seed, exact=True):
            slots, spec = side.slots[0], spec_of(kind, side.ops.geometry, device)
            queries = query.to(slots.kv.dtype)
            attended, weights = side.ops.attend(slots, 1, queries, spec, True)
            alone, none = side.ops.attend(slots, 0, queries, spec, False)
            assert none is None
            assert attended.dtype == alone.dtype == slots.kv.dtype
            total = torch.ones(slots.n, device=device)
            counted = (torch.arange(slots.n, device=device) % 3 > 0).float()
            weights.add_shares(total, counted, counted.sum())
            found.append(([attended, alone, weights.best(), total], slots))
        for expected, measured in zip(*(tensors for tensors, _ in found), strict=True):
            assert_near(measured, expected, dtype)
        (_, expected), (_, measured) = found
        assert int(measured.read_pairs) == int(expected.read_pairs) > 0
        assert torch.equal(measured.attended, expected.attended)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        *((shape, "all", torch.float32) for shape in SHAPES),
        ("plain", "plain", torch.float32),
        *(("odd", "all", dtype) for dtype in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
def test_spilled_tokens_are_read_from_the_host_pool(shape, kind, dtype, device):
    if dtype is torch.float32 and device.type == "cuda":
        pytest.skip("the GPU's matrix products round float32")
    g = geometry_of(shape, dtype)
    some = Layout(0, LAYERS, 0, 40, spills=True)
    picked = dataclasses.replace(some, heads=((g.kv_heads - 1,),) * LAYERS)
    edges = (39, 40, 41, 104) if shape == "odd" or WHOLE else ()
    for layout, tokens in ((some, 150), (picked, 150), *((some, tokens) for tokens in edges)):
        query = noise(tokens, device, dtype, g.q_heads, g.d_k)
        found = []
        for side in sides(g, device, layout, tokens=tokens, exact=True):
            (slots,), spec = side.slots, spec_of(kind, side.ops.geometry, device)
            attended, weights = side.ops.attend(slots, 1, query.to(slots.kv.dtype), spec, False)
            assert weights is None
            found.append((attended, int(slots.read_pairs)))
        (expected, read), (measured, measured_read) = found
        assert_near(measured, expected, dtype)
        assert read == measured_read > 0
        end = max(0, tokens + 1 - layout.window)
        stage(slots, side.ops.host, 1, end // g.page)
        assert_near(side.ops.attend(slots, 1, query.to(slots.kv.dtype), spec, False)[0], expected, dtype)
        assert int(slots.read_pairs) == 2 * read
        if len(slots.heads_of(1)) == g.kv_heads:
            before, slots.on_cpu = slots.read_pairs.clone(), range(max(0, end - 10), end)
            stage(slots, side.ops.host, 1, slots.on_cpu.start // g.page)
            slots.other_part = lambda of=(slots, side.ops.host, query, spec): attended_on_cpu(*of)
            assert_near(side.ops.attend(slots, 1, query.to(slots.kv.dtype), spec, False)[0], expected, dtype)
            assert int(slots.read_pairs - before) == read - len(slots.on_cpu) * g.kv_heads


def attended_on_cpu(slots, host, query, spec):
    """Attention over the tokens ``on_cpu``, all visible to the layer, without learned sinks."""
    g, some = host.geometry, slice(slots.on_cpu.start, slots.on_cpu.stop)
    keys, values = (rows[:, some].float() for rows in host.dense(1, host.total))
    logits = spec.scaling * query.float().view(g.kv_heads, g.group, -1) @ keys.transpose(1, 2)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    sums = logits.logsumexp(-1, keepdim=True)
    return torch.cat(((logits - sums).exp() @ values, sums), -1)


def stage(slots, host, layer, staged):
    """Let the first pages arrive when they are waited for; other pages may hold anything."""
    slots.staged = staged
    pages = host.table(layer)[:staged]
    slots.staging = pages.new_full((slots.staged + 1, *pages.shape[1:]), torch.nan)
    slots.arrived = lambda: slots.staging[: slots.staged].copy_(pages)
    slots.staged_layer = layer


def test_empty_slots_may_hold_anything(device):
    g = geometry_of("wide", torch.bfloat16)
    _, side = sides(g, device, Layout(0, LAYERS, 0, 96), tokens=TOKENS)
    (slots,) = side.slots
    slots.kv[:, :, :, slots.table[0, 0] == EMPTY] = torch.nan
    attended, weights = side.ops.attend(slots, 0, noise(0, device, g.dtype, g.q_heads, g.d_k), AttentionSpec(0.1), True)
    assert bool(attended.isfinite().all())
    assert torch.equal(weights.best()[0] == 0, slots.table[0, 0] == EMPTY)


def test_a_head_without_tokens_returns_zeros(device):
    g = geometry_of("plain", torch.float16)
    _, side = sides(g, device, Layout(0, LAYERS, 0, 40, shared=False), tokens=TOKENS)
    (slots,) = side.slots
    slots.table[0, 1] = EMPTY
    attended, weights = side.ops.attend(slots, 0, noise(0, device, g.dtype, g.q_heads, g.d_k), AttentionSpec(0.1), True)
    assert bool(attended[0].any())
    assert not bool(attended[1].any())
    assert not bool(weights.best()[1].any())
    total = torch.zeros(slots.n, device=device)
    weights.add_shares(total, torch.ones_like(total), torch.tensor(5.0, device=device))
    assert bool(total.isfinite().all())


@pytest.mark.parametrize(("programs", "dtype"), sampled([1, 7, 1000], [torch.bfloat16, torch.float16]), ids=str)
def test_outputs_do_not_depend_on_the_number_of_programs(programs, dtype, device):
    g = geometry_of("plain", dtype)
    expected, measured = sides(g, device, Layout(0, LAYERS, 0, 900), tokens=1000, exact=True)
    measured.ops.programs = programs
    for side in (expected, measured):
        fill_table(side.slots[0], 1000, seed=3)
    query, spec = noise(1, device, dtype, g.q_heads, g.d_k), AttentionSpec(0.3)
    one = expected.ops.attend(expected.slots[0], 0, query.float(), spec, False)[0]
    others = [measured.ops.attend(measured.slots[0], 0, query, spec, False)[0] for _ in range(2)]
    assert_near(others[0], one, dtype)
    assert torch.equal(*others)
