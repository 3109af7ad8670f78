"""The CPU's operations against the torch reference."""

import threading

import pytest
import torch
from support.kv_run import Run
from support.random_kv import SHAPES, geometry_of
from support.toy_model import toy

from kvchat.kv.memory.device_slots import DeviceSlots, Layout
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops import cpu_ops, verify
from kvchat.kv.ops.cpu_ops import CpuOps
from kvchat.kv.ops.selection import Candidates
from kvchat.kv.ops.torch_ops import TorchOps

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loops", ["compiled", "without numba"])
def test_every_operation_matches_the_reference(shape, dtype, loops, monkeypatch):
    monkeypatch.setattr(cpu_ops, "MANY", 1)
    if loops != "compiled":
        monkeypatch.setattr(cpu_ops, "compiled_loops", lambda *_: None)
    expected, measured = (verify.outcomes(kind, geometry_of(shape, dtype), CPU) for kind in (TorchOps, CpuOps))
    # Torch rounds intermediate results to bfloat16, the loops do not.
    allowed = 0.01 if dtype == torch.bfloat16 and loops == "compiled" else 1e-6
    assert {name for name in expected if not verify.error(measured[name], expected[name]) <= allowed} == set()


@pytest.mark.parametrize(("first", "last"), [(0, 19), (3, 12), (5, 8), (7, 7), (4, 3), (1, -3)])
def test_selections_match_the_reference_with_few_candidates(first, last):
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


@pytest.mark.parametrize("window", [None, 5, 1000])
def test_per_head_tables_match_the_reference(window):
    g = geometry_of("many", torch.float32)
    reference, ops = (kind(g, HostPool(g, CPU), CPU) for kind in (TorchOps, CpuOps))
    tables = [DeviceSlots(Layout(0, 2, sink=4, window=60, shared=False), g, CPU) for _ in range(2)]
    table = torch.randint(-1, 40, tables[0].table.shape, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    for slots, each in zip(tables, (reference, ops), strict=True):
        slots.table.copy_(table)
        each.begin_step(torch.tensor(39))
    biases = [each.bias(slots, 1, window) for slots, each in zip(tables, (reference, ops), strict=True)]
    assert torch.equal(*biases)
    assert torch.equal(tables[1].attended_of(1), table[1])
    assert int(tables[0].read_pairs) == int(tables[1].read_pairs) == int((biases[0] == 0).sum())


# ---- Loops compiled during a conversation take over from torch between two tokens


# Every policy for which loops select or attend, with pages of 32 tokens, as the loops need.
MODES = {
    "full": ("full", {}),
    "full-resident": ("full", {"resident": 64}),
    "streaming": ("streaming", {"budget": 64}),
    "freeze": ("freeze", {"K": 12, "tau": 0.9, "k": 1.0}),
    "sync": ("sync", {"budget": 80, "m": 3}),
    "speculative": ("speculative", {"budget": 96, "window": 32}),
    "four-bits": ("speculative", {"budget": 96, "window": 32, "index": "bits4"}),
    "freekv": ("speculative", {"budget": 160, "sink": 8, "window": 32, "tau": 0.7}),
    "freekv-bits": ("speculative", {"budget": 160, "window": 32, "unit": "page", "query": "own"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_loops_that_take_over_match_the_reference(mode, dtype, monkeypatch):
    monkeypatch.setattr(cpu_ops, "MANY", 1)
    monkeypatch.setattr(cpu_ops, "awaited", {})
    named = [name for name in vars(cpu_ops).values() if isinstance(name, str) and name.startswith(f"{cpu_ops.LOOPS}.")]
    cpu_ops.awaited.update({name: threading.Event() for name in named})
    name, params = MODES[mode]
    run = Run(toy(("plain", "plain"), dtype=dtype, unified=True), name, **params).begun(230, 3)
    while cpu_ops.awaited:
        cpu_ops.awaited.popitem()
        run.step(2)
    run.check()
