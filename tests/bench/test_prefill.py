"""The prefill benchmark: its rows hold together, and both sides read the same prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from support.integrity import check_integrity
from support.memory_faults import HostMemoryError
from support.shape_runner import filled
from typer.testing import CliRunner

from kvchat.bench import model_shapes, prefill, timing
from kvchat.bench.frame import Frame, ModelChoice, parsed
from kvchat.bench.settings import Prefill
from kvchat.cli.bench import app
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.modes import build

CPU = ModelChoice(device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rows_tell_the_ratio_to_one_forward_of_the_same_tokens(monkeypatch):
    read, one_shot = [], []
    plain_read, plain_shot = prefill._read, prefill._one_shot
    monkeypatch.setattr(prefill, "_read", lambda runner, ids: read.append(ids) or plain_read(runner, ids))
    monkeypatch.setattr(prefill, "_one_shot", lambda model, ids: one_shot.append(ids) or plain_shot(model, ids))
    lines = []
    settings = Prefill(shape="tiny", lengths=(40, 600), turn=5, rounds=2)
    result = prefill.run(settings, CPU, Frame(report=lines.append))
    assert [(row["tokens"], row["chunk"]) for row in result["rows"]] == [(40, 40), (600, 512)]
    for row in result["rows"]:
        assert row["times_one_shot"] == pytest.approx(sum(row["ratios"]) / 2)
        assert all(row[peak] is None or row[peak] > 2**20 for peak in ("peak_bytes", "one_shot_peak_bytes"))
        assert row["turn_seconds"] > 0
    assert [len(ids) for ids in read] == [40, 40, 5, 40, 5, 600, 600, 5, 600, 5]
    assert all(ids in read for ids in one_shot)
    assert len(lines) == 2
    json.dumps(result)


PEAKS = """
import sys, torch
from types import SimpleNamespace
from kvchat.bench import prefill

def peak(taken):
    model = SimpleNamespace(device=torch.device("cpu"))
    return prefill._measured(model, lambda: torch.ones(taken, dtype=torch.uint8)).peak_bytes

peak(1)
sys.stdout.write(" ".join(str(peak(taken)) for taken in (1, int(sys.argv[1]), 1)))
"""


@pytest.mark.slow("a process imports torch and transformers")
def test_the_peak_is_that_of_one_reading():
    """In a process of its own: what other tests left would be freed meanwhile."""
    if not timing.forget_peak():
        pytest.skip("the system does not let a process forget its peak")
    nbytes = 200 * 2**20
    command = [sys.executable, "-c", PEAKS, str(nbytes)]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    before, large, after = map(int, child.stdout.split())
    assert large - before == pytest.approx(nbytes, rel=0.1)
    assert after < large - 0.9 * nbytes


def test_the_peak_of_one_forward_is_without_the_pool_that_lies_beside_it(tiny_shape):
    runner = ModelRunner(tiny_shape, build(parsed("full"), geometry_of(tiny_shape), traits_of(tiny_shape)))
    pool = runner.kv.state.host.nbytes
    assert pool > 0
    assert prefill._without_pool(runner, prefill.Reading(1.0, pool + 5)) == 5
    assert prefill._without_pool(runner, prefill.Reading(1.0, None)) is None
    assert prefill._without_pool(runner, None) is None


def test_a_one_shot_that_does_not_fit_is_a_row_without_a_ratio(monkeypatch):
    monkeypatch.setattr(prefill, "_one_shot", lambda model, ids: None)
    lines = []
    settings = Prefill(shape="tiny", lengths=(40,), rounds=1)
    (row,) = prefill.run(settings, CPU, Frame(report=lines.append))["rows"]
    assert (row["times_one_shot"], row["one_shot_seconds"], row["ratios"]) == (None, None, [])
    assert "does not fit" in lines[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), HostMemoryError(2**40), MemoryError()])
def test_a_one_shot_for_which_memory_ran_out_is_none(tiny_shape, monkeypatch, error):
    monkeypatch.setattr(prefill, "_measured", Mock(side_effect=error))
    assert prefill._one_shot(tiny_shape, [1, 2, 3]) is None


def test_a_prompt_beyond_the_context_is_refused():
    with pytest.raises(UsageError, match=r"4,000 tokens and a turn of 200 after them are 4,200.*reads 4,096"):
        prefill.run(Prefill(shape="tiny", lengths=(4000,), turn=200), CPU)


def test_the_command_gives_json():
    arguments = ["prefill", "--shape", "tiny", "--device", "cpu", "--length", "30", "--rounds", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["tokens"] == 30


@pytest.mark.cuda
def test_a_gpu_reads_within_the_predicted_memory():
    result = prefill.run(Prefill(shape="llama-3.2-1b", lengths=(4096, 30_000), rounds=1))
    for row in result["rows"]:
        assert row["peak_bytes"] <= row["predicted_peak_bytes"]
    assert result["rows"][1]["peak_bytes"] < result["rows"][1]["one_shot_peak_bytes"]
    torch.cuda.empty_cache()


# ---- Models of known shapes: their sizes, and random K/V in every slot


SPECULATIVE = parsed("speculative:sink=64,window=64", 320)  # six retrieved pages


def test_filling_leaves_no_slot_empty_and_no_layer_alike(tiny_shape, monkeypatch):
    monkeypatch.setattr(model_shapes, "FILL_TOKENS", 128)
    runner = filled(tiny_shape, build(SPECULATIVE, geometry_of(tiny_shape), traits_of(tiny_shape)), 900)
    kv = runner.kv
    assert kv.total == 900
    keys = [kv.state.host.dense(layer, 900)[0] for layer in range(tiny_shape.layers)]
    assert all(bool((k != 0).all()) for k in keys)
    assert not torch.equal(keys[0], keys[1])
    assert bool((kv.state.slots[-1].pages >= 0).all())
    check_integrity(kv.state)


@pytest.mark.parametrize(
    ("name", "billions", "token_bytes"),
    [
        ("llama-3.1-8b", 8.03, 131_072),
        ("llama-3.2-3b", 3.21, 114_688),
        ("llama-3.2-1b", 1.24, 32_768),
        ("qwen2.5-7b", 7.62, 57_344),
        ("qwen3-4b", 4.02, 147_456),
        ("qwen3-8b", 8.19, 147_456),
        ("mistral-7b", 7.25, 131_072),
    ],
)
def test_shapes_have_the_published_sizes(name, billions, token_bytes):
    import transformers

    class_name, arguments = model_shapes.SHAPES[name]
    config = getattr(transformers, class_name)(**arguments)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert config.num_hidden_layers * config.num_key_value_heads * head * 2 * 2 == token_bytes


@pytest.mark.parametrize(
    ("choice", "message"),
    [(ModelChoice("x/y"), "cannot be combined"), (ModelChoice(quantize="int8"), "cannot be quantized"),
     (ModelChoice(dtype="int8"), 'no dtype "int8"')],
)  # fmt: skip
def test_what_random_weights_cannot_be_is_refused(choice, message):
    with pytest.raises(UsageError, match=message):
        model_shapes.choose("tiny", choice, lambda line: None)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), HostMemoryError(2**40), MemoryError()])
def test_a_shape_for_which_memory_runs_out_does_not_fit(monkeypatch, error):
    monkeypatch.setattr(model_shapes, "wrap", Mock(side_effect=error))
    with pytest.raises(DoesNotFitError, match="tiny does not fit cpu"):
        model_shapes.build("tiny", "cpu")
