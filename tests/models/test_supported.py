"""Weights that do not match their configuration are refused; valid ones are not."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from support import tiny_models, tiny_multimodal
from support.grids import WHOLE
from support.message import lacks
from support.model_folders import edit_json
from support.progress import silent
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvchat.engine.session import Session
from kvchat.errors import ModelError
from kvchat.models import support
from kvchat.models.description import describe
from kvchat.models.load import load_model
from kvchat.models.support import check_quantization, check_tensors, model_class, unreadable
from kvchat.protocol.messages import Load

# Architectures that test_plan does not load: one for each way to name or join tensors; the others in the long form.
VALID = ["mixtral", "phi3", "gemma3n", "gpt_neox", "opt", "nanochat"]
if WHOLE:
    VALID += ["qwen2", "gemma3", "cohere", "glm4", "stablelm", "ernie4_5", "granite", "nemotron"]


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
    ("name", "quantized", "message"),
    [
        ("quantization_config", {"quant_method": "exl3", "bits": 4.0}, "exl3"),
        ("quantization_config", {"group_size": 64, "bits": 4, "mode": "affine"}, "MLX"),
        ("quantization", {"group_size": 64, "bits": 4}, "MLX"),
    ],
    ids=["exl3", "mlx", "older mlx"],
)
def test_unknown_quantizations_are_refused(name, quantized, message):
    config = tiny_models.config("llama")
    setattr(config, name, quantized)
    with pytest.raises(ModelError, match=rf"a/model.*{message}.*GGUF"):
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
        ([scheme(["Linear"], num_bits=8), scheme(["re:.*experts.*"])], False),  # transformers distinguishes these
        ([scheme(["Linear"]), {"targets": None}], False),
        ([], False),
    ],
)
def test_layers_packed_in_several_ways_are_refused(groups, is_refused):
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
def test_known_quantizations_are_accepted(quantized):
    config = tiny_models.config("llama")
    config.quantization_config = quantized
    check_quantization(config, "a/model")


def test_a_model_that_needs_an_image_is_refused():
    from transformers import Blip2Config

    with pytest.raises(ModelError, match=r"Blip2ForCond.*pixel_values"):
        model_class(Blip2Config())


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("ShieldGemma2Config", "ShieldGemma2ForImageClassification"), ("Qwen3Config", "Qwen3ForSequenceClassification")],
)
def test_a_classifier_is_refused(kind, architecture):
    """transformers has a text class for both."""
    config = getattr(transformers, kind)(architectures=[architecture])
    with pytest.raises(ModelError, match=rf"{architecture}.*classifier"):
        model_class(config)


@pytest.mark.parametrize("name", VALID)
def test_a_models_own_weights_are_accepted(saved, name):
    folder = saved(name)
    model, info = loaded(folder)
    check_tensors(model, folder, info)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *((name, "num_hidden_layers") for name in ("llama", "qwen3_moe", "gpt_neox", "deepseek_v3")),
        ("gpt2", "n_layer"),
    ],
)
def test_a_configuration_with_fewer_layers_is_refused(saved, name, field):
    folder = saved(name)
    model, info = loaded(folder, **{field: 3})
    with pytest.raises(ModelError, match=r"config\.json.* \S*\.3\."):
        check_tensors(model, folder, info)


def test_weights_of_another_architecture_are_refused(saved):
    """Without its biases and norms the model would load and answer nonsense."""
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
def test_tensors_that_the_decoder_lacks_are_refused(name):
    with pytest.raises(ModelError, match=f"LlamaForCausalLM.* 1 tensor, such as {name}"):
        check_tensors(tiny_models.model("llama"), Path("x"), info(name))


@pytest.mark.parametrize(
    "name",
    ["v_head.summary.weight", "vision_tower.layers.9.weight", "mtp.layers.0.weight", "model.rotary_emb.inv_freq"],
)
def test_tensors_outside_the_decoder_are_ignored(name):
    check_tensors(tiny_models.model("llama"), Path("x"), info(name))


def test_causal_masks_of_old_files_are_ignored():
    masks = "transformer.h.0.attn.masked_bias", "transformer.h.0.attn.bias"
    check_tensors(tiny_models.model("gpt2"), Path("x"), info(*masks))
    with pytest.raises(ModelError, match=r"attn\.c_attn\.scale"):
        check_tensors(tiny_models.model("gpt2"), Path("x"), info(*masks, "transformer.h.0.attn.c_attn.scale"))


def test_drafting_layers_are_ignored():
    model, drafting = tiny_models.model("llama"), ["model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight"]
    check_tensors(model, Path("x"), info(*drafting))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.* 1 tensor, such as model\.layers\.5"):
        check_tensors(model, Path("x"), info(*drafting, "model.layers.5.mlp.up_proj.weight"))


def test_extra_tensors_of_quantizers_are_accepted():
    model = tiny_models.fresh("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    check_tensors(model, Path("x"), info("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.q_proj.bias"))
    with pytest.raises(ModelError, match=r"model\.layers\.4"):
        check_tensors(model, Path("x"), info("model.layers.4.self_attn.k_scale"))


def test_missing_tensors_are_reported_first():
    with pytest.raises(ModelError, match=r"lack 2 tensors.* a\."):
        check_tensors(
            tiny_models.model("llama"), Path("x"), {"missing_keys": {"b", "a"}, "unexpected_keys": {"lm_head.bias"}}
        )


def test_a_missing_head_may_be_tied(tmp_path):
    tiny_multimodal.save(tiny_models.fresh("llama", tie_word_embeddings=True), tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_model(Load(str(tmp_path), "cpu"), silent)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    load_model(Load(str(tmp_path), "cpu"), silent)


def test_an_unreadable_model_is_named():
    error = unreadable("x", "its config.json", ValueError("first\nsecond"))
    assert error.title.startswith("x ")


def test_the_reason_below_a_heading_is_shown(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match=r"eos_token_id.*'</s>'"):
        describe(str(tmp_path), "cpu", "auto", silent)


def test_a_package_that_the_model_needs_is_named():
    error = unreadable("x", "the model", ImportError("\nIts tower requires the timm library.\nYou can install it."))
    assert not lacks(error, "x needs a package", "Its tower requires the timm library")


def test_an_error_without_a_message_shows_its_class():
    assert "the model: AssertionError" in str(unreadable("x", "the model", AssertionError()))


# ---- The text part of multimodal checkpoints: loaded without the rest, and equal to the whole model on text


PROMPT, NEW = list(range(40, 75)), 12


@pytest.fixture(scope="module", params=tiny_multimodal.CONFIGS)
def pair(request, tmp_path_factory):
    """A whole model, and what kvchat loads of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    whole = tiny_multimodal.fresh(request.param)
    tiny_multimodal.save(whole, folder)
    return whole, load_model(Load(str(folder), "cpu", "float32"), silent)


def test_greedy_tokens_match_the_whole_model(pair):
    whole, part = pair
    output = whole.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    session = Session(part)
    logits, tokens = session.prefill(PROMPT), []
    for _ in range(NEW):
        tokens.append(int(logits.argmax()))
        logits = session.step(tokens[-1])
    assert tokens == output[0, len(PROMPT) :].tolist()


def test_only_the_text_part_takes_memory(pair):
    """Except one number of DeepSeek-VL's hybrid, for its encoders."""
    whole, part = pair
    decoder = [weight for name, weight in whole.get_decoder().named_parameters() if ".vision_moe." not in name]
    parameters = {*decoder, *whole.get_output_embeddings().parameters()}
    extra = part.model.num_parameters() - sum(parameter.numel() for parameter in parameters)
    assert extra == (part.model.config.model_type == "deepseek_vl_hybrid")
    assert whole.num_parameters() > part.model.num_parameters()
    assert re.search(r" no [a-z_ ]+ input", part.notes[-1])


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("gemma3", "vision"), ("deepseek_vl_hybrid", "high_res_vision and vision"), ("qwen2_audio", "audio")],
)
def test_a_note_names_the_inputs_left_out(name, left_out):
    assert f"no {left_out} input" in support.note(tiny_multimodal.config(name))


def test_dbrx_leaves_no_input_out():
    from transformers import DbrxConfig

    assert support.note(DbrxConfig()) == ""


class ReadLog:
    """A file, or one of its tensors, that records which tensors are read."""

    def __init__(self, inner, read, name=""):
        self._inner, self._read, self._name = inner, read, name

    def __enter__(self):
        return ReadLog(self._inner.__enter__(), self._read)

    def __exit__(self, *args):
        return self._inner.__exit__(*args)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_slice(self, name):
        return ReadLog(self._inner.get_slice(name), self._read, name)

    def __getitem__(self, index):
        self._read.append(self._name)
        return self._inner[index]


def test_only_text_tensors_are_read_from_the_files(monkeypatch, tmp_path):
    tiny_multimodal.save(tiny_multimodal.fresh("gemma3"), tmp_path)
    read = []
    monkeypatch.setattr("transformers.modeling_utils.safe_open", lambda *a, **k: ReadLog(safe_open(*a, **k), read))
    load_model(Load(str(tmp_path), "cpu", "float32"), silent)
    assert len(read) > 30
    assert not [name for name in read if "vision_tower" in name or "projector" in name]


def test_layers_with_different_heads_get_one_shape(tmp_path):
    tiny_multimodal.save(tiny_multimodal.fresh("gemma4"), tmp_path)
    part = load_model(Load(str(tmp_path), "cpu", "float32"), silent)
    assert (part.q_heads, part.kv_heads, part.d_k, part.d_v) == (4, 2, 32, 32)
    assert any("heads" in note for note in part.notes)
    assert part.probe.refusal is None  # keys can be moved, padded or not


def test_a_head_tied_by_the_outer_config_is_tied(tmp_path):
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


def test_the_text_class_is_used_if_it_reads_whole_checkpoints():
    from transformers import Gemma3nConfig, Gemma3nForCausalLM

    config = Gemma3nConfig()
    assert support.find(config) == (Gemma3nForCausalLM, config.text_config)


def test_torchao_checkpoints_use_the_class_they_were_packed_from():
    """Their metadata repeats the names of weights, which transformers does not map."""
    from transformers import Qwen3_5Config

    config = Qwen3_5Config()
    assert support.find(config)[0].__name__ == "Qwen3_5ForCausalLM"
    config.quantization_config = {"quant_method": "torchao"}
    assert support.find(config)[0].__name__ == "Qwen3_5ForConditionalGeneration"


def test_a_model_without_text_has_no_class():
    from transformers import ViTConfig

    assert support.find(ViTConfig()) is None
