"""Weights that do not belong to their configuration are refused, and nothing that is valid."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import transformers
from support import tiny_models
from support.message import lacks
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvchat.errors import ModelError
from kvchat.models.support import check_quantization, check_tensors, model_class, unreadable

VALID = [
    *("llama", "qwen2", "qwen3_moe", "mixtral", "phi3", "gemma2", "gemma3", "gemma3n", "gpt_neox", "gpt_oss", "cohere"),
    *("glm4", "stablelm", "ernie4_5", "nanochat", "gpt2", "opt", "deepseek_v3", "granite", "nemotron"),
]


def loaded(folder, **changes):
    """The model in ``folder`` with other values in its configuration, and transformers' loading information."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    config = type(tiny_models.config(folder.name)).from_pretrained(folder)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(folder, output_loading_info=True)


@pytest.fixture
def saved(tmp_path):
    def save(name):
        folder = tmp_path / name
        tiny_models.model(name).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize(
    ("quantized", "said"),
    [
        ({"quant_method": "exl3", "bits": 4.0}, "exl3"),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "method"),  # as MLX writes it
    ],
    ids=["exl3", "mlx"],
)
def test_what_transformers_would_read_as_not_quantized(quantized, said):
    config = tiny_models.config("llama")
    config.quantization_config = quantized
    with pytest.raises(ModelError, match=rf"a/model.*{said}.*GGUF"):
        check_quantization(config, "a/model")


def scheme(targets, **weights):
    return {"targets": targets, "format": "pack-quantized", "weights": {"num_bits": 4, "type": "int"} | weights}


@pytest.mark.parametrize(
    ("groups", "is_refused"),
    [
        ([scheme(["re:.*self_attn.*"], num_bits=8), scheme(["re:.*mlp.*"])], True),
        ([scheme(["re:.*self_attn.*"], group_size=32), scheme(["re:.*mlp.*"], group_size=128)], True),
        ([scheme(["re:.*experts.*"]), scheme(["re:.*shared_experts.*"], num_bits=8)], True),
        ([scheme(["re:.*self_attn.*"]), scheme(["re:.*mlp.*"])], False),
        ([scheme(["Linear"], num_bits=8), scheme(["re:.*experts.*"])], False),  # as transformers tells them apart
        ([scheme(["Linear"]), {"targets": None}], False),
        ([], False),
    ],
)
def test_layers_that_transformers_would_unpack_in_the_way_of_others(groups, is_refused):
    config = tiny_models.config("llama")
    named = {f"group_{number}": group for number, group in enumerate(groups)}
    config.quantization_config = {"quant_method": "compressed-tensors", "config_groups": named}
    refused = pytest.raises(ModelError, match=r"a/model.*several ways")
    with refused if is_refused else contextlib.nullcontext():
        check_quantization(config, "a/model")


@pytest.mark.parametrize(
    "quantized",
    [None, {}, {"load_in_4bit": True}, {"quant_method": "awq"}, {"quant_method": "bitsandbytes", "load_in_8bit": True}],
    ids=str,
)
def test_what_transformers_reads(quantized):
    config = tiny_models.config("llama")
    config.quantization_config = quantized
    check_quantization(config, "a/model")


def test_a_model_that_reads_no_text_without_an_image_is_refused():
    from transformers import Blip2Config

    with pytest.raises(ModelError, match=r"Blip2ForCond.*pixel_values"):
        model_class(Blip2Config())


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("ShieldGemma2Config", "ShieldGemma2ForImageClassification"), ("Qwen3Config", "Qwen3ForSequenceClassification")],
)
def test_a_model_that_classifies_is_refused(kind, architecture):
    """transformers has a class for the text of either."""
    config = getattr(transformers, kind)(architectures=[architecture])
    with pytest.raises(ModelError, match=rf"{architecture}.*classifier"):
        model_class(config)


@pytest.mark.parametrize("name", VALID)
def test_a_models_own_weights_belong_to_it(saved, name):
    folder = saved(name)
    model, info = loaded(folder)
    check_tensors(model, folder, info)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, "num_hidden_layers") for name in ("llama", "qwen3_moe", "phi3", "gpt_neox", "opt", "deepseek_v3")),
        ("gpt2", "n_layer"),
    ],
)
def test_a_configuration_with_fewer_layers_is_refused(saved, name, field):
    folder = saved(name)
    model, info = loaded(folder, **{field: 3})
    with pytest.raises(ModelError, match=r"config\.json.* \S*\.3\."):
        check_tensors(model, folder, info)


def test_weights_of_another_architecture_are_refused(saved):
    """Without their biases and norms they would load and answer nonsense."""
    folder = saved("qwen2").rename(saved("llama").parent / "llama-head32")
    model, info = loaded(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.k_proj\.bias"):
        check_tensors(model, folder, info)


def info(*unexpected):
    return {"missing_keys": [], "unexpected_keys": list(unexpected)}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.mlp.up_proj.weight",
        "layers.4.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "lm_head.bias",
        "model.norm.bias",
    ],
)
def test_tensors_that_the_decoder_lacks(name):
    with pytest.raises(ModelError, match=f"1 tensors.*LlamaForCausalLM.* {name}"):
        check_tensors(tiny_models.model("llama"), Path("x"), info(name))


@pytest.mark.parametrize(
    "name",
    ["v_head.summary.weight", "vision_tower.layers.9.weight", "mtp.layers.0.weight", "model.rotary_emb.inv_freq"],
)
def test_tensors_beside_the_decoder_are_ignored(name):
    check_tensors(tiny_models.model("llama"), Path("x"), info(name))


def test_layers_that_draft_further_tokens_are_ignored():
    model, drafting = tiny_models.model("llama"), ["model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight"]
    check_tensors(model, Path("x"), info(*drafting))
    with pytest.raises(ModelError, match=r"1 tensors.*LlamaForCausalLM.* model\.layers\.5"):
        check_tensors(model, Path("x"), info(*drafting, "model.layers.5.mlp.up_proj.weight"))


def test_quantizers_keep_tensors_of_their_own():
    model = tiny_models.fresh("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    check_tensors(model, Path("x"), info("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.q_proj.bias"))
    with pytest.raises(ModelError, match=r"model\.layers\.4"):
        check_tensors(model, Path("x"), info("model.layers.4.self_attn.k_scale"))


def test_missing_tensors_come_first():
    with pytest.raises(ModelError, match=r"2 tensors are missing.* a\."):
        check_tensors(
            tiny_models.model("llama"), Path("x"), {"missing_keys": {"b", "a"}, "unexpected_keys": {"lm_head.bias"}}
        )


def test_transformers_own_words_are_passed_on():
    error = unreadable("x", "its config.json", ValueError("first\nsecond"))
    assert error.title.startswith("x ")


def test_a_package_that_a_part_of_the_model_needs_is_named():
    error = unreadable("x", "the model", ImportError("\nIts tower requires the timm library.\nYou can install it."))
    assert not lacks(error, "x needs a package", "Its tower requires the timm library")


def test_an_error_without_words_is_named_by_its_kind():
    assert "the model: AssertionError" in str(unreadable("x", "the model", AssertionError()))
