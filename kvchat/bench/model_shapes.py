"""Models of real shapes with random weights: speed and memory depend on shapes, not on the weights' values.

The shapes are those published with the models. Nothing is downloaded; weights are generated on the device itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvchat.bench.frame import ModelChoice
from kvchat.errors import DoesNotFitError, UsageError, check_known
from kvchat.kv.manager import KVManager, is_out_of_memory
from kvchat.kv.modes.sync_heads import Calibration, default_clusters
from kvchat.models import attention_hook
from kvchat.models.description import DTYPES, resolve_device
from kvchat.models.load import LoadedModel, wrap

FILL_TOKENS = 4096  # tokens whose K/V are generated at once


def _llama3(factor: float, **shape: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _shape(vocab=128_256, context=131_072, rope=rope, eps=1e-5, **shape)


def _shape(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    context: int,
    rope: dict[str, Any] | float = 10_000.0,
    eps: float = 1e-6,
    **more: Any,
) -> dict[str, Any]:
    """Return a configuration; ``heads`` are query heads and KV heads, and ``rope`` is theta if it is a number."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": context,
        "rope_parameters": rope if isinstance(rope, dict) else {"rope_type": "default", "rope_theta": rope},
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        **more,
    }


# name: transformers' configuration class and its arguments
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("LlamaConfig", _llama3(8.0, hidden=4096, inner=14_336, layers=32, heads=(32, 8))),
    "llama-3.2-3b": (
        "LlamaConfig",
        _llama3(32.0, hidden=3072, inner=8192, layers=28, heads=(24, 8), head_dim=128, tie_word_embeddings=True),
    ),
    "llama-3.2-1b": (
        "LlamaConfig",
        _llama3(32.0, hidden=2048, inner=8192, layers=16, heads=(32, 8), head_dim=64, tie_word_embeddings=True),
    ),
    "qwen2.5-7b": ("Qwen2Config", _shape(152_064, 3584, 18_944, 28, (28, 4), 131_072, 1_000_000.0)),
    "qwen3-4b": (
        "Qwen3Config",
        _shape(151_936, 2560, 9728, 36, (32, 8), 40_960, 1_000_000.0, head_dim=128, tie_word_embeddings=True),
    ),
    "qwen3-8b": ("Qwen3Config", _shape(151_936, 4096, 12_288, 36, (32, 8), 40_960, 1_000_000.0, head_dim=128)),
    "mistral-7b": (
        "MistralConfig",
        _shape(32_768, 4096, 14_336, 32, (32, 8), 32_768, 1_000_000.0, 1e-5, head_dim=128, sliding_window=None),
    ),
    # The bundled model's shape with a longer context than it was trained for.
    "bundled-128k": (
        "LlamaConfig",
        _shape(8192, 384, 1024, 8, (8, 4), 131_072, 500_000.0, 1e-5, head_dim=64, tie_word_embeddings=True),
    ),
    "tiny": ("LlamaConfig", _shape(256, 64, 96, 4, (4, 2), 4096)),
}


# The tokenizer of a model that reads no text.
NO_TOKENIZER = SimpleNamespace(chat_template="none", eos_token_id=None, all_special_ids=(), added_tokens_decoder={})


def choose(shape: str, choice: ModelChoice, progress: Callable[[str], None]) -> LoadedModel:
    """Return the model of ``choice``, or random weights in the named ``shape``, on its device.

    Raises:
        UsageError: a shape was combined with a model or a quantization; KvchatError: it cannot be loaded.
    """
    if not shape:
        return choice.load(progress)
    if choice.model != ModelChoice.model:
        raise UsageError("A model and a shape cannot be combined.", hint="Use either --model or --shape.")
    if choice.quantize != ModelChoice.quantize:
        raise UsageError(
            "Random weights cannot be quantized.", f"Given: --quantize {choice.quantize}.", "Use a --model."
        )
    return build(shape, choice.device, choice.dtype)


def build(name: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Build a model of the shape ``name`` with random weights; "auto" is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        UsageError: the shape, device or dtype is unknown.
        DoesNotFitError: the weights do not fit the device.
    """
    import transformers

    check_known(name, SHAPES, "model shape")
    on = resolve_device(device)
    check_known(dtype, ["auto", *DTYPES], "dtype")
    precision = {"auto": torch.bfloat16 if on.type == "cuda" else torch.float32, **DTYPES}[dtype]
    class_name, arguments = SHAPES[name]
    config = getattr(transformers, class_name)(**arguments)
    attention_hook.register()
    try:
        with torch.device(on):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=precision, attn_implementation=attention_hook.NAME
            ).eval()
        return wrap(model, NO_TOKENIZER, f"{name} (random weights)")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"{name} does not fit {on}.", str(error).partition("\n")[0], "Use a smaller --shape or a smaller dtype."
        ) from error


def fill(kv: KVManager, tokens: int) -> None:
    """Append random K/V of ``tokens`` tokens and random queries, without prefill.

    Every slot then holds data: empty slots are masked and would make steps look too fast.
    """
    state, g, start = kv.state, kv.state.geometry, kv.total
    with torch.inference_mode():
        kv.begin_prefill(tokens)
        for layer in range(g.layers):
            for first in range(start, start + tokens, FILL_TOKENS):
                n = min(FILL_TOKENS, start + tokens - first)
                keys = torch.randn((g.kv_heads, n, g.d_k), dtype=g.dtype, device=state.device)
                values = torch.randn((g.kv_heads, n, g.d_v), dtype=g.dtype, device=state.device)
                state.host.append(layer, first, keys, values)
        state.query.normal_()
        kv.commit_prefill(tokens)
        kv.refill()


def calibration(model: LoadedModel) -> Calibration:
    """Return a random calibration for sync mode, whose cost does not depend on which head represents which."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand((model.layers, model.kv_heads, model.kv_heads), generator=draw, dtype=torch.float64)
    alike = (scores + scores.transpose(1, 2)) / 2
    similarity = tuple(tuple(tuple(row) for row in layer) for layer in alike.tolist())
    retrieval = tuple(tuple(layer) for layer in scores[:, 0].tolist())
    return Calibration("", "nothing: random weights", default_clusters(model.kv_heads), similarity, retrieval)
