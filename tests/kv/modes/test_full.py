"""Full mode: the same logits for any number of resident tokens, one copy of K/V on a CPU, correct figures."""

import pytest
import torch
from support import tiny_models
from support.kv_run import Run
from support.kv_steps import use_gpu_path
from support.tiny_runner import load_tiny, prefill_logits, runner_of, token_ids
from support.toy_model import toy

from kvchat.engine import runner
from kvchat.engine.metrics import Ribbon
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.inspect import attended, attended_counts, read_tokens
from kvchat.kv.memory import available
from kvchat.kv.modes import full

ARCHITECTURES = ["llama", "llama-mha", "qwen2-window", "gemma2", "gemma3", "gpt_oss", "cohere2", "deepseek_v3", "gpt2"]
RING = 64


def steps(one, ids):
    return torch.stack([one.step(token) for token in ids])


@pytest.mark.parametrize("name", [*ARCHITECTURES, *tiny_models.HYBRID[:1]])
def test_logits_do_not_depend_on_where_tokens_are_stored(name, monkeypatch):
    model = load_tiny(name)
    in_place = runner_of(model)
    monkeypatch.setattr(runner, "Geometry", lambda *sizes, unified, **rest: Geometry(*sizes, **rest))
    monkeypatch.setattr("support.tiny_runner.geometry_of", runner.geometry_of)
    runners = [in_place, runner_of(model), runner_of(model, resident=RING)]
    use_gpu_path(runners[2].kv)
    ids = token_ids(200)
    for act, low, high in (
        (prefill_logits, 0, RING - 4),
        (steps, 60, 70),
        (prefill_logits, 70, 126),
        (steps, 126, 131),
    ):
        in_slots, *others = (act(each, ids[low:high]) for each in runners)
        for other in others:
            torch.testing.assert_close(other, in_slots, atol=2e-5, rtol=1e-4)
    in_place_n, all_n, ring_n = (each.kv.state.slots[0].n for each in runners)
    assert (in_place_n, ring_n) == (0, RING)
    assert all_n > 131


def test_nothing_is_stored_twice_on_a_cpu():
    model = toy(("plain", "window", "sinks"), page=8, kv_heads=3, d_v=24, unified=True)
    run = Run(model, "full").begun(90)
    assert run.kv.device_bytes == 0
    keys, values = run.kv.state.host.dense(1, 90)
    region = run.kv.state.host.layers[1]
    assert {keys.untyped_storage().data_ptr(), values.untyped_storage().data_ptr()} == {
        region.untyped_storage().data_ptr()
    }
    assert keys[0].is_contiguous() or keys.stride(1) == run.toy.geometry.d
    run.step(50)
    run.check()
    assert read_tokens(run.kv.state) == sum(range(91, 141)) * 2 / 3 + 50 * 24 / 3
    assert run.kv.state.transfer.totals == (0, 0, 0, 0)


def test_tokens_streamed_from_ram_are_counted_and_shown():
    run = Run(toy(("plain", "window"), page=8), "full", resident=RING).begun(100)
    before = run.kv.state.transfer.moved_bytes()
    run.step(10)
    g = run.toy.geometry
    far = sum(total - RING for total in range(101, 111))  # the layer with a window of 24 reads none of it
    assert run.kv.state.transfer.moved_bytes() - before == far * g.token_bytes // 2
    assert read_tokens(run.kv.state) == (sum(range(101, 111)) + 10 * 24) / 2
    assert bool(attended(run.kv.state, 0).all())
    report = run.kv.mode.report()
    assert report.stats == {"streamed from RAM": "46 tok", "attended on the CPU": "0 tok"}
    cell, letters, shares = Ribbon(run.kv).cells(attended_counts(run.kv.state), report)
    assert (cell, letters) == (8, "HHHHHH" + "DDDDDDDD")
    assert shares[:10] == "5" * 10  # the layer with the window reads the last 24


@pytest.mark.parametrize("room", [300, 100, 0])
def test_tokens_that_do_not_fit_stay_in_ram(room, monkeypatch):
    run = Run(toy(("plain", "plain"), page=8), "streaming", budget=64, sink=4).begun(200)
    g = run.toy.geometry
    monkeypatch.setattr(full, "staging_bytes", lambda *_: 0)
    monkeypatch.setattr(full, "PREFILL_WORKSPACE", 0)
    monkeypatch.setattr(available, "usable", lambda free: free)
    monkeypatch.setattr(available, "free_bytes", lambda device: room * (g.token_bytes + 8))
    run.switch("full")
    sizes = set()
    for _ in range(200):
        run.step()
        sizes.add(run.kv.device_bytes)
    run.check()
    assert run.kv.state.slots[0].layout.spills
    window = run.kv.state.slots[0].layout.window
    assert len(sizes) <= 2
    assert RING <= window < 400


def test_a_too_small_ring_is_rejected():
    with pytest.raises(UsageError, match="resident = 3"):
        Run(toy(), "full", resident=3)
