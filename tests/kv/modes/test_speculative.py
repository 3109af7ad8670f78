"""Speculative mode: how a budget is split, which query selects, the compiled loops, and refusals."""

from dataclasses import replace

import pytest
import torch
from support.grids import sampled
from support.kv_run import Run
from support.kv_steps import decode_step, forward, use_gpu_path
from support.toy_model import Toy, toy

from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.inspect import attended
from kvchat.kv.modes.freekv import FreeKV
from kvchat.kv.modes.speculative import Speculative
from kvchat.kv.ops import cpu_ops

SMALL = {"budget": 80, "sink": 8, "window": 24}


def large(dtype: torch.dtype = torch.float32, **kwargs: object) -> Toy:
    """Pages of 32 tokens in unified memory, as the compiled loops need."""
    model = toy(("plain", "window", "softcap", "sinks", "plain"), unified=True, dtype=dtype, ids=2048, **kwargs)
    specs = [replace(spec, window=spec.window and 150) for spec in model.specs]
    return replace(model, specs=tuple(specs))


@pytest.mark.parametrize(("unified", "window"), [(True, 32), (False, 64)])
def test_a_budget_is_split_into_sinks_window_and_tokens(unified, window):
    mode = Run(toy(("plain", "plain"), unified=unified), "speculative", budget=256).kv.mode
    assert isinstance(mode, Speculative)
    assert (mode.sink, mode.window, mode.k) == (4, window, 256 - 4 - window)


@pytest.mark.parametrize(("shape", "bits"), sampled([(1, 1, 64), (2, 3, 64), (3, 2, 40), (1, 9, 128)], [2, 4]), ids=str)
def test_compiled_loops_match_the_reference(shape, bits):
    kv_heads, group, d = shape
    run = Run(large(kv_heads=kv_heads, group=group, d_k=d, d_v=d), "speculative", budget=128, index=f"bits{bits}")
    run.prefill(700, chunk=333)
    run.step(20)
    run.pin([*range(3, 9), *range(300, 320)])
    run.step(8)
    run.truncate(610)
    run.prefill(30)
    run.step(5)
    run.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loops_select_what_torch_selects(dtype, monkeypatch):
    runs = []
    for loops in (True, False):
        if not loops:
            monkeypatch.setattr(cpu_ops, "compiled_loops", lambda *_: None)
        run = Run(large(dtype, kv_heads=2, group=3, d_k=64, d_v=64), "speculative", budget=96, window=32).begun(500, 3)
        runs.append([attended(run.kv.state, layer) for layer in range(5)])
    differ = sum(int((one != other).sum()) for one, other in zip(*runs, strict=True))
    assert differ <= (0 if dtype == torch.float32 else 4)  # of tokens equal up to rounding either may be read


def test_reading_the_host_pool_in_place_copies_nothing():
    run = Run(large(), "speculative", budget=96).begun(400, 5)
    assert run.kv.state.transfer.totals.moved == 0
    assert run.kv.state.slots[-1].kv.nbytes == 0
    assert run.kv.device_bytes == run.kv.mode.plan(run.kv.state.capacity).device_bytes(run.toy.geometry)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_the_estimate_one_layer_ahead_selects_the_tokens(on_a_gpu):
    """The estimate decides, not the query: runs with equal estimates read the same tokens."""
    run = Run(toy(("plain", "plain", "plain"), page=8), "speculative", query="ahead", **SMALL)
    if on_a_gpu:
        use_gpu_path(run.kv)
    run.prefill(200)
    layers = range(3)
    run.fresh += 5
    ids = run._new_ids(1)
    new = [run.toy.qkv(layer, ids, 200) for layer in layers]
    other = [run.toy.qkv(layer, [ids[0] + 300], 200)[0] for layer in layers]
    with decode_step(run.kv), forward(run.kv):
        for layer in layers:
            if layer < 2:
                assert run.kv.wants_ahead
                run.kv.estimated(layer + 1, other[layer + 1])
            run.kv.attention(layer, *new[layer], run.toy.specs[layer])
    own = Run(toy(("plain", "plain", "plain"), page=8), "speculative", query="own", **SMALL).begun(200)
    with decode_step(own.kv), forward(own.kv):
        for layer in layers:
            own.kv.attention(layer, other[layer], *new[layer][1:], run.toy.specs[layer])
    for layer in (1, 2):
        assert torch.equal(attended(run.kv.state, layer), attended(own.kv.state, layer))


def test_layers_without_an_estimate_use_their_own_query():
    runs = [Run(toy(("plain", "plain"), page=8), "speculative", query=query, **SMALL) for query in ("ahead", "own")]
    for run in runs:
        use_gpu_path(run.kv)
        run.prefill(200)
        run.step(4)
    assert torch.equal(*(attended(run.kv.state, 1) for run in runs))


@pytest.mark.parametrize("given", [{"tau": 0.7}, {"index": "bounds"}, {"index": "blocks"}, {"profile": "paper"}])
def test_freekv_parameters_build_freekv(given):
    assert isinstance(Run(toy(("plain", "plain")), "speculative", **given).kv.mode, FreeKV)


@pytest.mark.parametrize(
    "given",
    [
        {"budget": 64, "sink": 40, "window": 32},
        {"budget": 64, "sink": 4, "window": 31},
        {"index": "bounds", "unit": "token"},
        {"tau": 0.5, "unit": "token"},
        {"query": "ahead", "unit": "page"},
    ],
)
def test_contradictory_parameters_are_rejected(given):
    with pytest.raises(UsageError):
        Run(toy(("plain", "plain")), "speculative", **given)


def test_one_layer_models_need_first_full_off():
    with pytest.raises(DoesNotFitError):
        Run(toy(("plain",)), "speculative")
    assert Run(toy(("plain",)), "speculative", first_full=False).kv.mode.first == 0
