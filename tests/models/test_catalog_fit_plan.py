"""The list of models says of their weights what the plan says, by the names and sizes in the files' headers."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import transformers
from support.progress import silent
from transformers.core_model_loading import revert_weight_conversion

from kvchat.models import catalog, description
from kvchat.models.repacking import by_quantization

WIDE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2, "vocab_size": 50_000}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
QWEN_TOWER = {"depth": 4, "hidden_size": 1024, "out_hidden_size": 2048, "deepstack_visual_indexes": [1]}
GPT2 = {"n_embd": 2048, "n_layer": 2, "n_head": 16, "vocab_size": 50_000}
DBRX_EXPERTS = {"hidden_size": 2048, "ffn_hidden_size": 1024, "moe_num_experts": 4, "moe_top_k": 2}
DBRX = {
    "d_model": 2048,
    "n_heads": 16,
    "n_layers": 2,
    "vocab_size": 50_000,
    "ffn_config": DBRX_EXPERTS,
    "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4},
}
DELTA_NET = {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS = {
    "llama": ("LlamaConfig", {**WIDE, **HEADS}),
    "a tied head": ("LlamaConfig", {**WIDE, **HEADS, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", GPT2),
    "experts": ("Qwen3MoeConfig", {**WIDE, **HEADS, **MOE}),
    "experts with biases": ("GptOssConfig", {**WIDE, **HEADS, "num_local_experts": 4}),
    "experts of its own": ("DbrxConfig", DBRX),
    "gemma3": ("Gemma3Config", {"text_config": {**WIDE, **HEADS}, "vision_config": TOWER}),
    "qwen3_vl": ("Qwen3VLConfig", {"text_config": {**WIDE, **HEADS}, "vision_config": QWEN_TOWER}),
    "qwen3_5": ("Qwen3_5Config", {"text_config": {**WIDE, **HEADS, **DELTA_NET}, "vision_config": QWEN_TOWER}),
}


@pytest.fixture
def folder(tmp_path, request):
    """A checkpoint of which only the headers are written."""
    name, values = CONFIGS[request.param]
    config = getattr(transformers, name)(**values, dtype=torch.bfloat16)
    kind = "ImageTextToText" if "vision_config" in values else "CausalLM"
    with torch.device("meta"):
        whole = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(tmp_path)
    header, end = {}, 0
    for tensor, value in revert_weight_conversion(whole, dict(whole.named_parameters())).items():
        begin, end = end, end + value.nbytes
        header[tensor] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return tmp_path


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_the_list_says_what_the_plan_says(folder, monkeypatch):
    found = catalog.at(folder)
    monkeypatch.setattr(description, "milliseconds", lambda rows, columns: (3.0, 1.0))
    for setting, dtype in (("auto", "bfloat16"), ("float32", "float32")):
        made = description.describe(str(folder), "cpu", setting, silent)
        assert str(made.dtype) == f"torch.{dtype if found.weights.mlp else 'float32'}"
        listed = catalog.needs(found, found.weights, setting, catalog.Room("cpu", 2**40))
        assert listed == pytest.approx(by_quantization(made), rel=0.01)
