"""Every mode with the kernels against the independent reference, step by step, with the kv's invariants."""

import dataclasses

import pytest
import torch
from support.dense_attention import assert_near, dense
from support.integrity import check_integrity
from support.kv_run import Run
from support.kv_steps import decode_step, forward, prefill
from support.mode_rows import FIRST, ROWS
from support.toy_model import toy

from kvchat.config.modes import parse
from kvchat.kv.inspect import attended
from kvchat.kv.manager import KVManager
from kvchat.kv.modes import build
from kvchat.kv.ops.triton_ops import TritonOps

# Besides the first row of each mode, rows that use other kernels: the host pool read over the link, no speculated
# pages, a table per layer.
CASES = [*FIRST.values(), "full-resident", "freekv-sync", "freeze-budget"]


def with_kernels(run):
    ops = TritonOps(run.kv.state.geometry, run.kv.state.host, torch.device("cpu"))
    ops.ctas, ops.programs = 2, 4
    run.kv.state.ops = run.kv.state.transfer.ops = ops
    return run


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("row", CASES)
def test_sets_and_outputs_match_the_reference(row):
    kinds = ("plain", "plain", "window") if row in FIRST.values() else ("plain", "sinks")
    run = with_kernels(Run.of_row(row, toy(kinds, d_k=20, d_v=24, page=8, seed=3)))
    run.prefill(100, chunk=60)
    run.step(6)
    run.prefill(30)
    run.step(2)
    run.check()
    moves = row not in ("full", "streaming")
    assert (run.kv.state.transfer.totals.moved > 0) == moves


@pytest.mark.usefixtures("interpreter")
def test_switches_work_with_softcaps_and_bfloat16():
    model = toy(("plain", "softcap"), page=8, dtype=torch.bfloat16)
    run = with_kernels(Run(model, "full"))
    run.prefill(90)
    for row in ("speculative", "full-resident", "freeze", "sync"):
        mode, params = ROWS[row]
        run.switch(mode, **params)
        run.step(3)
    run.check()


# ---- on a GPU

WIDE = {
    "full": {},
    "streaming": {"budget": 256, "sink": 4, "R": 8, "sigma": 6, "delta": 5},
    "freeze": {"tau": 0.9},
    "sync": {"budget": 400, "m": 5},
    "speculative": {"budget": 512, "sink": 32, "window": 96, "tau": 0.7},
}


class Gpu:
    """A kv on the GPU that decodes the tokens of a ``Toy``."""

    def __init__(self, model, mode):
        self.model, g = model, model.geometry
        self.device = torch.device("cuda")
        rotation = dataclasses.replace(model.rotations[0], inv_freq=model.rotations[0].inv_freq.to(self.device))
        traits = dataclasses.replace(model.traits, rotations=(rotation,) * g.layers)
        self.specs = [
            spec if spec.sinks is None else dataclasses.replace(spec, sinks=spec.sinks.to(self.device))
            for spec in model.specs
        ]
        self.kv = KVManager(g, self.device, build(parse(mode, WIDE[mode]), g, traits))
        assert self.kv.state.ops.name == "triton"
        self.total = 0

    def qkv(self, layer, ids):
        parts = self.model.qkv(layer, [i % 1024 for i in ids], ids[0])
        return (x.to(self.device) for x in parts)

    def prefill(self, n):
        ids = list(range(self.total, self.total + n))
        with prefill(self.kv, n):
            for layer, spec in enumerate(self.specs):
                self.kv.attention(layer, *self.qkv(layer, ids), spec)
        self.total += n
        self.kv.refill(fresh=True)

    def step(self):
        ids = [self.total]
        with decode_step(self.kv), forward(self.kv):
            out = [self.kv.attention(i, *self.qkv(i, ids), spec) for i, spec in enumerate(self.specs)]
        self.total += 1
        return torch.stack(out)


def wide(dtype, kinds=("plain", "window", "softcap", "sinks")):
    return toy(kinds, kv_heads=4, group=4, d_k=128, d_v=128, page=32, dtype=dtype)


def check_outputs(gpu, outputs):
    """Compare with dense attention in float64 over the tokens read."""
    for layer, spec in enumerate(gpu.specs):
        query, _, _ = gpu.qkv(layer, [gpu.total - 1])
        keys, values = gpu.kv.state.host.dense(layer, gpu.total)
        expected = dense(query[:, 0], keys, values, attended(gpu.kv.state, layer), spec)
        assert_near(outputs[layer][:, 0], expected, gpu.model.geometry.dtype, f"layer {layer}")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", WIDE)
def test_long_answers_on_a_gpu_match_dense_attention(mode, dtype):
    gpu = Gpu(wide(dtype), mode)
    gpu.prefill(1500)
    for step in range(400):
        outputs = gpu.step()
        if step % 40 == 0 and mode != "streaming":  # which rotates its sinks
            check_outputs(gpu, outputs)
    check_integrity(gpu.kv.state)
