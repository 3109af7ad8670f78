"""A GGUF file of a loaded model's own weights, so that a program that reads GGUF decodes the same model.

Only the weights matter: prompts are handed over as ids, so each token's text is its id (``<17>``), and what is answered
can be read back as ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvchat.errors import UsageError
from kvchat.models.load import LoadedModel

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write(model: LoadedModel, file: Path) -> None:
    """Write the matrices in the model's dtype, vectors in float32, and the parameters of the architecture.

    Raises:
        UsageError: another architecture than Llama with plain rotary positions; ImportError: no package gguf.
    """
    import gguf

    config = model.model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type != "llama" or rotary != "default" or config.attention_bias or config.mlp_bias:
        raise UsageError(
            f"{model.name} cannot be copied to GGUF.",
            "Only Llama models with plain rotary positions are copied.",
            "Take the bundled model, or leave llama.cpp out.",
        )
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{id}>" for id in range(config.vocab_size)])
    writer.add_token_merges(["< 0"])  # one at least must be there
    kind = gguf.GGMLQuantizationType[KINDS[model.dtype]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        values = rotated_in_pairs(name, weight, config).float().cpu().contiguous().numpy()
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(values, stored), raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: Any) -> None:
    """Write the parameters of a Llama architecture; ``writer`` is gguf's, ``config`` transformers'."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def rotated_in_pairs(name: str, weight: Tensor, config: Any) -> Tensor:
    """The parameter ``name`` as GGUF has it: there neighbors rotate, in transformers a head's halves."""
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    count = next((heads[end] for end in heads if name.endswith(end)), None)
    if count is None:
        return weight
    return weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
