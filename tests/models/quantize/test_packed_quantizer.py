"""Linears that are packed while transformers reads a model keep the weights that were read."""

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
def test_what_an_architecture_initializes_itself_is_as_it_was_read(tmp_path, quantize):
    """transformers' Nemotron-H initializes each ``out_proj.weight`` that is not marked as read."""
    tiny_multimodal.save(tiny_models.fresh("nemotron_h", vocab_size=tiny_multimodal.VOCAB), tmp_path)
    plain, packed = (load_model(Load(str(tmp_path), "cpu", quantize=name), silent).model for name in ("none", quantize))
    assert ROWS in packed.model.layers[0].mixer.out_proj.__dict__
    assert relative_error(sample_logits(packed), sample_logits(plain)) < CLOSE[quantize]


@pytest.mark.parametrize("quantize", CLOSE)
def test_experts_of_text_are_packed_without_those_of_images_in_the_same_files(tmp_path, quantize):
    tiny_multimodal.save(tiny_multimodal.fresh("ernie4_5_vl_moe"), tmp_path)
    plain, packed = (load_model(Load(str(tmp_path), "cpu", quantize=name), silent).model for name in ("none", quantize))
    assert STACKS in packed.get_decoder().layers[1].mlp.text_moe.experts.__dict__
    assert relative_error(sample_logits(packed), sample_logits(plain)) < CLOSE[quantize]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_weights_of_other_sizes_than_the_configuration_names_are_refused(tmp_path, name, quantize):
    tiny_multimodal.save(tiny_models.fresh(name, vocab_size=tiny_multimodal.VOCAB), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = {"intermediate_size": 128, "moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | other))
    with pytest.raises(ModelError, match="weights"):
        load_model(Load(str(tmp_path), "cpu", "float32", quantize=quantize), silent)


@pytest.mark.parametrize(
    ("name", "quantize", "said"),
    [
        ("qwen3_moe", "int8", None),
        ("nemotron_h", "int4", "[1-9][0-9]%.*float32.*int4"),
        ("gpt2", "int4", "100%.*float32.*int4"),
        ("llama", "int8", None),
        ("opt", "int8", None),  # its positions are a table
    ],
)
def test_weights_that_stay_as_they_are_are_noted(tmp_path, name, quantize, said):
    tiny_multimodal.save(tiny_models.fresh(name), tmp_path)
    notes = load_model(Load(str(tmp_path), "cpu", "float32", quantize=quantize), silent).notes
    assert bool(said) == any("float32" in note for note in notes)
    assert said is None or re.search(said, " ".join(notes))
    assert not any("unpacked" in note for note in notes)
