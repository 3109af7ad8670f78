"""Tiny random models of many architectures: four layers of width 64, built without a download.

Every weight is random, norms, biases and sinks included, and large enough that a wrong mask, scale or rotation
changes the logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from kvchat.models import attention_hook

VOCAB = 199
CONTEXT = 512
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GPT2_NAMES = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LLAMA3_ROPE = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LONG_ROPE = rope(
    "longrope",
    factor=4.0,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
    original_max_position_embeddings=64,
)

RECURRENT_FIRST = ["linear_attention", "full_attention"] * 2
DELTA_NET = {
    "head_dim": 16,
    "layer_types": RECURRENT_FIRST,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MLA = {  # keys and values from a latent vector
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SHARED_EXPERT = {**MOE, "shared_expert_intermediate_size": 32}
MAMBA = {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}

# Configuration class and differences from COMMON, by name; a dict under "only" replaces COMMON.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-head32": ("LlamaConfig", {"head_dim": 32}),
    "llama-linear": ("LlamaConfig", rope("linear", factor=4.0)),
    "llama-yarn": ("LlamaConfig", YARN_ROPE),
    "llama-llama3": ("LlamaConfig", LLAMA3_ROPE),
    "llama-dynamic": ("LlamaConfig", rope("dynamic", factor=4.0)),
    "llama-longrope": ("LlamaConfig", LONG_ROPE),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen2_moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, **MOE}),
    "mistral": ("MistralConfig", {"sliding_window": 8, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {"sliding_window": 8, "partial_rotary_factor": 0.5}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "rotary_pct": 0.25}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 8}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.07,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "embedding_multiplier": 12.0,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **YARN_ROPE},
    ),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 8}),
    "glm": ("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "smollm3": ("SmolLM3Config", {}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "ministral3": ("Ministral3Config", {"head_dim": 16}),
    "arcee": ("ArceeConfig", {}),
    "hunyuan_v1": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "apertus": ("ApertusConfig", {}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "exaone4": ("Exaone4Config", {"sliding_window": 8}),
    "nanochat": ("NanoChatConfig", {}),
    "gpt2": ("GPT2Config", {"only": GPT2_NAMES}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None, "intermediate_size": None},
    ),
    # mixtures whose code reads back which experts were chosen
    "dbrx": (
        "DbrxConfig",
        {
            "only": {
                "vocab_size": VOCAB,
                "d_model": 64,
                "n_layers": 4,
                "n_heads": 4,
                "max_seq_len": CONTEXT,
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
                "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            }
        },
    ),
    "jetmoe": (
        "JetMoeConfig",
        {"num_attention_heads": None, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **MLA,
            "q_lora_rank": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    # hybrid: some layers keep a recurrent state, in falcon_h1 all of them in addition to their K/V
    "qwen3_5": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA_NET, **SHARED_EXPERT}),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA_NET, **SHARED_EXPERT}),
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1, 3]}),
    "lfm2_moe": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, **MOE}),
    "lfm3": ("Lfm3Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            **MAMBA,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "mlp", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    ),
    "jamba": ("JambaConfig", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **MLA,
            "layer_types": RECURRENT_FIRST,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_local_experts": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 32, **MAMBA}),
    "olmo_hybrid": ("OlmoHybridConfig", {"layer_types": RECURRENT_FIRST}),
    # refused
    "falcon": (
        "FalconConfig",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_key_value_heads": None, "intermediate_size": None},
    ),
    "bloom": ("BloomConfig", {"only": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 4, "n_head": 4}}),
    "mpt": ("MptConfig", {"only": {"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 4}}),
    "t5": ("T5Config", {"only": {"vocab_size": VOCAB, "d_model": 64}}),
    "bart": ("BartConfig", {"only": {"vocab_size": VOCAB, "d_model": 64}}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "num_experts_per_tok": 1,
        },
    ),
    "blt": ("BltConfig", {"only": {"vocab_size": VOCAB}}),
    "deepseek_v32": ("DeepseekV32Config", {}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3}),
    "minimax": ("MiniMaxConfig", {"head_dim": 16, "layer_types": RECURRENT_FIRST, "num_local_experts": 4}),
    "zamba": ("ZambaConfig", {"num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}),
    "mamba2": (
        "Mamba2Config",
        {
            "only": {
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_heads": 8,
                "head_dim": 16,
                "state_size": 16,
                "n_groups": 1,
            }
        },
    ),
}


# Architectures that keep a recurrent state; ``STATES`` has one for each kind of state.
HYBRID = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "lfm3", "granite_hybrid", "nemotron_h", "falcon_h1"),
    *("jamba", "kimi_linear", "bamba", "olmo_hybrid"),
)
STATES = ("qwen3_5", "lfm2", "nemotron_h", "falcon_h1", "jamba", "kimi_linear")


def config(name: str, **changes: Any) -> Any:
    """Return a new transformers configuration."""
    class_name, differences = CONFIGS[name]
    values = differences.get("only") or {**COMMON, **differences}
    given = {key: value for key, value in values.items() if value is not None}
    return getattr(transformers, class_name)(**given | changes)


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model with kvchat's attention hook; the same object at every call."""
    return fresh(name, dtype)


def fresh(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a new model with the same weights at every call; ``changes`` apply to its config."""
    attention_hook.register()
    torch.manual_seed(0)
    asked = config(name, **changes)
    built = transformers.AutoModelForCausalLM.from_config(asked, attn_implementation=attention_hook.NAME)
    randomize(built)
    return built.eval().to(dtype)


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter random values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter)


def _randomize(name: str, parameter: torch.Tensor) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0, 0.8 if "embed" in name else 0.12)
    elif "norm" in name and name.endswith("weight"):
        parameter += 0.1 * torch.randn_like(parameter)
    else:
        parameter.normal_(0, 0.3)
