"""The scaling of positions in GGUF files, which transformers does not read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.progress import silent
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvchat.errors import ModelError
from kvchat.models.description import describe

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OF_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0, **LLAMA3}


def divisors():
    """Those that llama.cpp's converter writes for Llama 3.2, of a head of 32."""
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, rope_parameters=dict(OF_LLAMA3))
    plain = 500000.0 ** (-torch.arange(16) / 16)
    return (plain / LlamaRotaryEmbedding(config).inv_freq).numpy()


def rope_of(path, kind="llama", kv=(), tensors=()):
    """``rope_parameters`` of what is loaded from a file with these keys and tensors."""
    import gguf

    writer = gguf.GGUFWriter(path / "model.gguf", kind)
    writer.add_block_count(6)
    writer.add_context_length(4096)
    writer.add_embedding_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(500000.0)
    for key, value in dict(kv).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{kind}.rope.{key}", value)
    layers = {f"blk.{layer}.attn_norm.weight": np.ones(128, np.float32) for layer in range(6)}
    for name, values in (layers | dict(tensors)).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return describe(str(path), "cpu", "float32", silent).text_config.rope_parameters


def test_llama_3s_divisors_are_its_scaling(tmp_path):
    assert rope_of(tmp_path, tensors={"rope_freqs.weight": divisors()}) == OF_LLAMA3


@pytest.mark.parametrize(
    ("kv", "scaling"),
    [
        ({}, {"rope_type": "default"}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_a_factor_is_its_scaling(tmp_path, kv, scaling):
    assert rope_of(tmp_path, kv=kv) == {"rope_theta": 500000.0, **scaling}


def test_gemmas_sliding_layers_are_not_scaled(tmp_path):
    rope = rope_of(tmp_path, "gemma3", {"scaling.type": "linear", "scaling.factor": 8.0})
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0}
    assert rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"rope_factors_long.weight": np.ones(16, np.float32)}, "by longrope, which transformers does not read"),
        ({"rope_freqs.weight": np.full(16, 3, np.float32)}, "by divisors that are not Llama 3's"),
    ],
)
def test_what_transformers_has_no_scaling_for_is_refused(tmp_path, tensors, reason):
    with pytest.raises(ModelError, match=reason):
        rope_of(tmp_path, tensors=tensors)
