"""GGUF files: headers written by hand, and models written as llama.cpp converts them."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kvchat.bench.external import baselines
from kvchat.models import gguf_file
from kvchat.models.load import LoadedModel
from kvchat.paths import bundled_model_dir

# transformers' names, in the order of replacement, and llama.cpp's.
LFM2_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.embedding_norm.": "token_embd_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    ".operator_norm.": ".attn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.out_proj.": ".attn_output.",
    ".self_attn.q_layernorm.": ".attn_q_norm.",
    ".self_attn.k_layernorm.": ".attn_k_norm.",
    ".feed_forward.w1.": ".ffn_gate.",
    ".feed_forward.w3.": ".ffn_up.",
    ".feed_forward.w2.": ".ffn_down.",
    ".conv.in_proj.": ".shortconv.in_proj.",
    ".conv.out_proj.": ".shortconv.out_proj.",
    ".conv.conv.": ".shortconv.conv.",
}

PAIRED = ("llama", "arcee", "granite", "mistral3", "smollm3")  # architectures whose heads rotate pairs of neighbors
# transformers' names and llama.cpp's keys for the same values.
VALUES = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def gguf_header(*tensors: tuple[str, tuple[int, ...], int], values: Sequence[bytes] = ()) -> bytes:
    """A file with several kinds of values and ``tensors`` of zeros: name, shape in ggml's order, type number."""
    values = [
        *values,
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("llama.context_length") + struct.pack("<II", 4, 4096),
        _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b"),
        _text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0),
    ]
    infos, at = [], 0
    for name, shape, kind in tensors:
        infos.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at))
        _, elements, nbytes = gguf_file.TYPES[kind]
        at += -(-math.prod(shape) // elements * nbytes // 32) * 32
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)) + b"".join(values + infos)
    return header + bytes(-len(header) % 32 + at)


def number(key: str, value: int) -> bytes:
    """A key with an integer, for ``gguf_header``."""
    return _text(key) + struct.pack("<II", 4, value)


def text(key: str, value: str) -> bytes:
    """A key with a text, for ``gguf_header``."""
    return _text(key) + struct.pack("<I", 8) + _text(value)


def write_norms(
    path: Path,
    kind: str,
    layers: int,
    width: int,
    values: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> None:
    """A model of norms and ``tensors``: four query heads of 32, two KV heads, and ``values`` of its rope."""
    import gguf

    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (values or {}).items():
        add[type(value)](f"{kind}.rope.{key}", value)
    norms = {f"blk.{layer}.attn_norm.weight": np.ones(width, np.float32) for layer in range(layers)}
    for name, array in (norms | (tensors or {})).items():
        writer.add_tensor(name, array)
    _finish(writer)


def write_model(path: Path, model: LoadedModel, kind: str = "Q8_0", table_kind: str = "") -> None:
    """The bundled model as a GGUF file: matrices in layers of the type ``kind``, others of ``table_kind``, if given."""
    import gguf

    config = model.model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("bundled")
    baselines.describe(writer, config)
    _add_vocabulary(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.model.named_parameters():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        tensors[theirs] = baselines.rotated_in_pairs(name, parameter.detach(), config)
    _write(writer, tensors, kind, table_kind or kind)


def write_lfm2(path: Path, model: Any, kind: str) -> None:
    """An LFM2 model with the bundled vocabulary, as llama.cpp converts it."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    attending = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * attends for attends in attending])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_vocabulary(writer, config)
    tensors = {}
    for name, parameter in model.named_parameters():
        theirs = functools.reduce(lambda done, pair: done.replace(*pair), LFM2_NAMES.items(), name)
        tensors[theirs] = parameter.detach().squeeze(1) if name.endswith("conv.conv.weight") else parameter.detach()
    _write(writer, tensors, kind, kind)


def write_tiny(
    path: Path, model: Any, kind: str, name: str = "tiny", layers: str = "F32", gates_are_rows: bool = True
) -> None:
    """A model of llama.cpp's architecture ``kind`` with the bundled vocabulary, as llama.cpp converts it.

    ``layers`` is the type of the matrices in layers; the gates of shared experts are rows, or matrices of one.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_name(name)
    for named, key in VALUES.items():
        if kind == "lfm2moe" and named == "num_key_value_heads":
            writer.add_head_count_kv([config.num_key_value_heads * (each != "conv") for each in config.layer_types])
        elif (value := getattr(config, named, None)) is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{kind}.{key}", value)
    if rope := getattr(config, "rope_parameters", None):
        whole, head = rope.get("full_attention", rope), config.hidden_size // config.num_attention_heads
        rotated = (getattr(config, "head_dim", None) or head) * whole.get("partial_rotary_factor", 1)
        writer.add_rope_dimension_count(int(rotated))
        writer.add_rope_freq_base(whole["rope_theta"])
        writer.add_rope_freq_base_swa(rope.get("sliding_attention", whole)["rope_theta"])
        if whole["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(whole["factor"])
            writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
        if beta := whole.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(beta)
            writer.add_rope_scaling_yarn_log_mul(whole["mscale_all_dim"])
    if kind in ("olmo2", "exaone4") and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if kind == "lfm2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "vl" in kind:  # positions of pixels: for text all of them are the same
        writer.add_rope_dimension_sections([3, 3, 2, 0])
        writer.add_num_deepstack_layers(0)
    _add_vocabulary(writer, config)
    architecture = next(one for one, its in gguf.MODEL_ARCH_NAMES.items() if its == kind)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    for name, parameter in (*model.named_parameters(), *biases):
        layer, tensor = f"blk.{next(filter(str.isdigit, name.split('.')), '')}", parameter.detach()
        if ".experts." in name:
            end = "bias" if name.endswith("bias") else "weight"
            tensor = tensor.transpose(1, 2) if kind == "gpt-oss" and end == "weight" else tensor
            gate, up = (tensor[:, ::2], tensor[:, 1::2]) if kind == "gpt-oss" else tensor.chunk(2, dim=1)
            found = {"down": tensor} if "down_proj" in name else {"gate": gate, "up": up}
            tensors |= {f"{layer}.ffn_{part}_exps.{end}": matrices for part, matrices in found.items()}
        elif name.endswith("sinks"):
            tensors[f"{layer}.attn_sinks.weight"] = tensor
        elif name.endswith("expert_bias"):
            tensors[f"{layer}.exp_probs_b.bias"] = tensor
        elif name.endswith("conv.conv.weight"):
            tensors[f"{layer}.shortconv.conv.weight"] = tensor.squeeze(1)
        else:
            tensor = baselines.rotated_in_pairs(name, tensor, config) if kind in PAIRED else tensor
            tensor = tensor + 1 if kind in ("gemma2", "gemma3") and name.endswith("norm.weight") else tensor
            tensor = (
                tensor.T if kind == "gpt2" and name.endswith(("attn.weight", "proj.weight", "fc.weight")) else tensor
            )
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = (
                tensor.squeeze(0) if gates_are_rows else tensor
            )
    _write(writer, tensors, layers, "F32")


def _add_vocabulary(writer: Any, config: Any) -> None:
    tokenizer = json.loads((bundled_model_dir() / "tokenizer.json").read_text())
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def _write(writer: Any, tensors: dict[str, Tensor], kind: str, table_kind: str) -> None:
    """Write ``tensors`` by GGUF name; matrices have the type ``kind`` in layers and ``table_kind`` outside."""
    import gguf

    for name, tensor in tensors.items():
        if tensor.dim() == 1 or name.endswith("bias") or "shortconv.conv" in name:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
        else:
            its_kind = gguf.GGMLQuantizationType[kind if name.startswith("blk.") else table_kind]
            packed = gguf.quantize(tensor.float().contiguous().numpy(), its_kind)
            writer.add_tensor(name, packed, raw_dtype=its_kind)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
