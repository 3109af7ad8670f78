"""Linears that are packed while transformers loads a model keep the loaded weights."""

import json
import re

import pytest
from support import tiny_models, tiny_multimodal
from support.progress import silent

from kvchat.errors import ModelError
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.models.quantize.rows import ROWS, STACKS
from kvchat.protocol.messages import Load

CLOSE = {"int8": 0.05, "int4": 0.5}


@pytest.mark.parametrize("quantize", CLOSE)
def test_weights_initialized_by_the_architecture_keep_loaded_values(tmp_path, quantize):
    """transformers' Nemotron-H initializes each ``out_proj.weight`` that is not marked as read."""
    tiny_multimodal.save(tiny_models.fresh("nemotron_h", vocab_size=tiny_multimodal.VOCAB), tmp_path)
    plain, packed = (load_model(Load(str(tmp_path), "cpu", quantize=name), silent).model for name in ("none", quantize))
    assert ROWS in packed.model.layers[0].mixer.out_proj.__dict__
    assert relative_error(sample_logits(packed), sample_logits(plain)) < CLOSE[quantize]


@pytest.mark.parametrize("quantize", CLOSE)
def test_text_experts_are_packed_without_image_experts(tmp_path, quantize):
    tiny_multimodal.save(tiny_multimodal.fresh("ernie4_5_vl_moe"), tmp_path)
    plain, packed = (load_model(Load(str(tmp_path), "cpu", quantize=name), silent).model for name in ("none", quantize))
    assert STACKS in packed.get_decoder().layers[1].mlp.text_moe.experts.__dict__
    assert relative_error(sample_logits(packed), sample_logits(plain)) < CLOSE[quantize]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_weights_of_the_wrong_size_are_refused(tmp_path, name, quantize):
    tiny_multimodal.save(tiny_models.fresh(name, vocab_size=tiny_multimodal.VOCAB), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = {"intermediate_size": 128, "moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | other))
    with pytest.raises(ModelError, match="weights"):
        load_model(Load(str(tmp_path), "cpu", "float32", quantize=quantize), silent)


@pytest.mark.parametrize(
    ("name", "quantize", "pattern"),
    [
        ("qwen3_moe", "int8", None),
        ("nemotron_h", "int4", "[1-9][0-9]%.*float32.*int4"),
        ("gpt2", "int4", "100%.*float32.*int4"),
        ("llama", "int8", None),
        ("opt", "int8", None),  # its positions are an embedding table
    ],
)
def test_weights_that_stay_unpacked_are_noted(tmp_path, name, quantize, pattern):
    tiny_multimodal.save(tiny_models.fresh(name), tmp_path)
    notes = load_model(Load(str(tmp_path), "cpu", "float32", quantize=quantize), silent).notes
    assert bool(pattern) == any("float32" in note for note in notes)
    assert pattern is None or re.search(pattern, " ".join(notes))
    assert not any("unpacked" in note for note in notes)
