"""Models of known shapes: their sizes, and random K/V in every slot."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from support.memory_faults import HostMemoryError
from support.shape_runner import filled

from kvchat.bench import model_shapes
from kvchat.bench.frame import ModelChoice, parsed
from kvchat.engine.runner import geometry_of, traits_of
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.inspect import check_integrity
from kvchat.kv.modes import build

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
    [(ModelChoice("x/y"), "exclude each other"), (ModelChoice(quantize="int8"), "not quantized"),
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
