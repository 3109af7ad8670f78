"""Tiny random models that read images or sound too: whole conditional-generation models, as repositories hold them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from support.tiny_models import ALTERNATING, COMMON, DELTA_NET, MOE, SHARED_EXPERT, randomize

from kvchat.paths import bundled_model_dir

VOCAB = 8192  # that of the bundled tokenizer
TEXT = {**COMMON, "vocab_size": VOCAB, "head_dim": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8}
QWEN3_VISION = {**QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

ERNIE_MOE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": [32, 24],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
SAM_VISION = {
    "model_type": "sam_vision_model",
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
    "mlp_dim": 48,
    "global_attn_indexes": [1],
    "window_size": 4,
}
AUDIO = {
    "d_model": 32,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "num_mel_bins": 16,
    "max_source_positions": 32,
}

# Configuration class, text_config, vision_config
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING},
        VISION,
    ),
    "gemma4": (
        "Gemma4Config",
        {
            **TEXT,
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
        {**VISION, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "mistral3": ("Mistral3Config", {**TEXT, "model_type": "ministral3"}, {**VISION, "model_type": "pixtral"}),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {**TEXT, "head_dim": None, "rope_parameters": MROPE},
        {**QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": ("Qwen3VLConfig", {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, QWEN3_VISION),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", {**TEXT, "rope_parameters": MROPE, **MOE}, QWEN3_VISION),
    "qwen3_5": ("Qwen3_5Config", {**TEXT, **DELTA_NET}, QWEN3_VISION),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", {**TEXT, **DELTA_NET, **SHARED_EXPERT}, QWEN3_VISION),
    "lfm2_vl": ("Lfm2VlConfig", {**TEXT, "head_dim": None, "model_type": "lfm2", "full_attn_idxs": [1, 3]}, VISION),
    "video_llama_3": (
        "VideoLlama3Config",
        {**TEXT, "head_dim": None, "model_type": "qwen2"},
        {key: value for key, value in VISION.items() if key != "image_size"},
    ),
    "llava": ("LlavaConfig", {**TEXT, "model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeConfig",
        {**TEXT, **ERNIE_MOE, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 4]}},
        QWEN_VISION,
    ),
    "deepseek_vl_hybrid": (
        "DeepseekVLHybridConfig",
        {**TEXT, "model_type": "llama"},
        {**VISION, "model_type": "siglip_vision_model"},
    ),
    "qwen2_audio": ("Qwen2AudioConfig", {**TEXT, "head_dim": None, "model_type": "qwen2"}, {}),
}
# Configurations of other encoders
OTHERS = {"deepseek_vl_hybrid": {"high_res_vision_config": SAM_VISION}, "qwen2_audio": {"audio_config": AUDIO}}


def config(name: str) -> Any:
    """The configuration of a whole model."""
    class_name, text, vision = CONFIGS[name]
    encoders = ({"vision_config": dict(vision)} if vision else {}) | OTHERS.get(name, {})
    return getattr(transformers, class_name)(
        text_config={key: value for key, value in text.items() if value is not None}, **encoders
    )


def fresh(name: str) -> Any:
    """Return a new whole model with the same weights at every call, with transformers' own attention."""
    torch.manual_seed(0)
    built = transformers.AutoModelForMultimodalLM.from_config(config(name), attn_implementation="eager")
    randomize(built)
    return built.eval()


def save(model: Any, folder: Path, **options: Any) -> None:
    """Write a checkpoint with the bundled tokenizer; ``options`` are those of ``save_pretrained``."""
    model.save_pretrained(folder, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_dir() / name, folder)
