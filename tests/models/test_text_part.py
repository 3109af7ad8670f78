"""The language part of multimodal checkpoints: loaded without the rest, and equal to the whole model on text."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors import safe_open
from support import tiny_models, tiny_multimodal
from support.progress import silent
from transformers import AutoConfig, AutoModelForImageTextToText

from kvchat.engine.session import Session
from kvchat.models import support
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

PROMPT, NEW = list(range(40, 75)), 24


@pytest.fixture(scope="module", params=tiny_multimodal.CONFIGS)
def pair(request, tmp_path_factory):
    """A whole model, and what kvchat loads of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    whole = tiny_multimodal.fresh(request.param)
    tiny_multimodal.save(whole, folder)
    return whole, load_model(Load(str(folder), "cpu", "float32"), silent)


def test_greedy_tokens_are_those_of_the_whole_model(pair):
    whole, part = pair
    made = whole.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    session = Session(part)
    logits, tokens = session.prefill(PROMPT), []
    for _ in range(NEW):
        tokens.append(int(logits.argmax()))
        logits = session.step(tokens[-1])
    assert tokens == made[0, len(PROMPT) :].tolist()


def test_nothing_beside_the_text_takes_memory(pair):
    """But for a number of its own that DeepSeek-VL's hybrid has for its encoders."""
    whole, part = pair
    decoder = [weight for name, weight in whole.get_decoder().named_parameters() if ".vision_moe." not in name]
    parameters = {*decoder, *whole.get_output_embeddings().parameters()}
    beside = part.model.num_parameters() - sum(parameter.numel() for parameter in parameters)
    assert beside == (part.model.config.model_type == "deepseek_vl_hybrid")
    assert whole.num_parameters() > part.model.num_parameters()
    assert re.search(r" no [a-z_ ]+ input", part.notes[-1])


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("gemma3", "vision"), ("deepseek_vl_hybrid", "high_res_vision and vision"), ("qwen2_audio", "audio")],
)
def test_what_is_left_out_is_named(name, left_out):
    assert f"no {left_out} input" in support.note(tiny_multimodal.config(name))


def test_the_halves_of_dbrxs_layers_are_no_part_beside_the_text():
    from transformers import DbrxConfig

    assert support.note(DbrxConfig()) == ""


def test_nothing_beside_the_text_is_read_from_the_files(monkeypatch, tmp_path):
    tiny_multimodal.save(tiny_multimodal.fresh("gemma3"), tmp_path)
    read, of_slice = [], safe_open.get_slice

    class Spy:
        def __init__(self, *args, **kwargs):
            self._file = safe_open(*args, **kwargs)

        def __enter__(self):
            self._file.__enter__()
            return self

        def __exit__(self, *args):
            return self._file.__exit__(*args)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def get_slice(self, name):
            return Slice(name, of_slice(self._file, name))

    class Slice:
        def __init__(self, name, content):
            self._name, self._content = name, content

        def __getitem__(self, index):
            read.append(self._name)
            return self._content[index]

        def __getattr__(self, name):
            return getattr(self._content, name)

    monkeypatch.setattr("transformers.modeling_utils.safe_open", Spy)
    load_model(Load(str(tmp_path), "cpu", "float32"), silent)
    assert len(read) > 30
    assert not [name for name in read if "vision_tower" in name or "projector" in name]


def test_layers_of_different_heads_are_given_one_shape(tmp_path):
    tiny_multimodal.save(tiny_multimodal.fresh("gemma4"), tmp_path)
    part = load_model(Load(str(tmp_path), "cpu", "float32"), silent)
    assert (part.q_heads, part.kv_heads, part.d_k, part.d_v) == (4, 2, 32, 32)
    assert any("heads" in note for note in part.notes)
    assert part.probe.refusal is None  # keys can be moved, filled up or not


def test_a_head_that_only_the_whole_configuration_ties_is_tied(tmp_path):
    config = tiny_multimodal.config("qwen3_5")
    config.tie_word_embeddings = True
    tiny_multimodal.save(AutoModelForImageTextToText.from_config(config), tmp_path)
    assert not AutoConfig.from_pretrained(tmp_path).text_config.tie_word_embeddings
    part = load_model(Load(str(tmp_path), "cpu", "float32"), silent).model
    assert part.get_output_embeddings().weight is part.get_input_embeddings().weight


def test_the_chat_template_of_a_processor_is_used(tmp_path):
    tiny_multimodal.save(tiny_multimodal.fresh("llava"), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_model(Load(str(tmp_path), "cpu", "float32"), silent).tokenizer.chat_template == template


def test_text_models_are_taken_as_they_are():
    config = tiny_models.config("llama")
    found, its_config = support.find(config)
    assert (found.__name__, its_config) == ("LlamaForCausalLM", config)
    assert support.note(config) == ""


def test_transformers_own_class_is_taken_where_it_reads_whole_checkpoints():
    from transformers import Gemma3nConfig, Gemma3nForCausalLM

    config = Gemma3nConfig()
    assert support.find(config) == (Gemma3nForCausalLM, config.text_config)


def test_what_torchao_packed_is_read_by_the_class_that_it_was_packed_from():
    """It names the weights again beside them, and transformers does not map those names."""
    from transformers import Qwen3_5Config

    config = Qwen3_5Config()
    assert support.find(config)[0].__name__ == "Qwen3_5ForCausalLM"
    config.quantization_config = {"quant_method": "torchao"}
    assert support.find(config)[0].__name__ == "Qwen3_5ForConditionalGeneration"


def test_a_model_without_text_is_none():
    from transformers import ViTConfig

    assert support.find(ViTConfig()) is None
