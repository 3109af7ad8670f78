"""The CPU's operations do what the torch reference does."""

from __future__ import annotations

import pytest
import torch
from support.random_stores import SHAPES, geometry_of

from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops import verify
from kvchat.kv.ops.cpu_ops import CpuOps
from kvchat.kv.ops.selection import Candidates
from kvchat.kv.ops.torch_ops import TorchOps

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_operation_does_what_the_reference_does(shape, dtype):
    expected, measured = (verify.outcomes(kind, geometry_of(shape, dtype), CPU) for kind in (TorchOps, CpuOps))
    assert {name for name in expected if not verify.error(measured[name], expected[name]) <= 1e-6} == set()


@pytest.mark.parametrize(("first", "last"), [(0, 19), (3, 12), (5, 8), (7, 7), (4, 3), (1, -3)])
def test_choices_are_the_references_however_few_candidates_there_are(first, last):
    g = geometry_of("many", torch.float32)
    reference, ops = (kind(g, HostPool(g, CPU), CPU) for kind in (TorchOps, CpuOps))
    draw = torch.Generator().manual_seed(0)
    candidates = Candidates.between(first, torch.tensor(last), 20)
    resident = torch.full((g.kv_heads, 5), -1)
    for _ in range(30):
        scores = torch.randn((g.kv_heads, g.group, 20), generator=draw)
        flagged = torch.rand(g.kv_heads, generator=draw) < 0.5
        for heads in (None, flagged):
            placed = ops.choose(scores, candidates, resident, heads)
            expected = reference.choose(scores, candidates, resident, heads)
            assert torch.equal(placed.sort(1).values, expected.sort(1).values)
            stays = (placed[:, :, None] == resident[:, None]) & (placed >= 0)[:, :, None]
            assert bool((stays.any(2) == (stays & torch.eye(5, dtype=torch.bool)).any(2)).all())  # in its slot
            resident = placed


@pytest.mark.parametrize("picked", [None, ((1, 3), (0, 2))])
def test_a_token_is_written_to_its_slots_and_through(picked):
    g = geometry_of("many", torch.bfloat16)
    layouts = [Layout(0, g.layers, 0, 64), Layout(0, g.layers, 4, 16, heads=picked, shared=False)]
    written = []
    for kind in (TorchOps, CpuOps):
        host = HostPool(g, CPU)
        slots = [DeviceSlots(layout, g, CPU) for layout in layouts]
        ops, draw = kind(g, host, CPU), torch.Generator().manual_seed(0)
        for at in range(40):
            position = torch.tensor(at)
            ops.begin_step(position)
            for each in slots:
                each.assign(position)
            for layer in range(g.layers):
                k, v = (torch.randn((g.kv_heads, d), generator=draw).bfloat16() for d in (g.d_k, g.d_v))
                ops.append(slots, layer, k, v)
        stored = [part for layer in range(g.layers) for part in host.dense(layer, 40)]
        held = [part for each in slots for layer in range(g.layers) for part in (each.keys(layer), each.values(layer))]
        written.append([*stored, *held])
    assert all(torch.equal(one, other) for one, other in zip(*written, strict=True))
