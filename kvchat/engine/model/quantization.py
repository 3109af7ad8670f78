"""Quantized weights: 4 bits by bitsandbytes on request, and checkpoints that are quantized already.

transformers and its quantizers do the work; kvchat chooses their configuration and names the package that is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvchat.errors import ModelError, UsageError, did_you_mean

CHOICES = ("none", "4bit")
INSTALL = "pip install 'kvchat[bnb]'"


@dataclass(frozen=True)
class Quantization:
    """How the weights are stored: transformers' name of the method (empty: unquantized) and its loading options.

    ``share`` is the least fraction of the files' bytes that the loaded weights take.
    """

    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0


def resolve(quantize: str, config: Any, dtype: torch.dtype) -> Quantization:
    """The quantization for a choice (one of ``CHOICES``) and a checkpoint's ``config``; ``dtype`` is the arithmetic's.

    Raises:
        UsageError: there is no such choice.
        ModelError: bitsandbytes is not installed, or the checkpoint is quantized already.
    """
    if quantize not in CHOICES:
        raise UsageError(f'There is no quantization "{quantize}".', did_you_mean(quantize, CHOICES))
    own = own_method(config)
    if quantize == "none":
        return Quantization(own)
    if own:
        raise ModelError(
            f"The model is quantized already, by {own}.", "Its weights cannot be put into 4 bits again.", "Give none."
        )
    return _four_bits(config, dtype)


def missing(name: str, quantized: Quantization, error: ImportError) -> ModelError:
    """The refusal of a model for which a package is missing; transformers' message names it."""
    message = " ".join(str(error).split())[:300]
    hint = f"{INSTALL}, then try again." if "bitsandbytes" in quantized.method else "Install it, then try again."
    return ModelError(f"{name} needs a package that is not installed.", f"transformers says: {message}", hint)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights on its device, quantization constants included."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def is_packed(model: Any) -> bool:
    """Some weights are in a form that only their quantizer multiplies; those of a GGUF file are usually unpacked."""
    plain = (torch.float32, torch.float16, torch.bfloat16)
    return bool(own_method(model.config)) and any(tensor.dtype not in plain for tensor in _tensors(model))


def notes(model: Any) -> list[str]:
    """Notes to the user about a loaded model's weights."""
    method, dtype = own_method(model.config), str(model.dtype).removeprefix("torch.")
    return [f"The {method} weights were unpacked to {dtype}."] if method and not is_packed(model) else []


def describe(model: Any) -> str:
    """The name of a loaded model's quantization; empty if its weights are not packed."""
    if not is_packed(model):
        return ""
    method = own_method(model.config)
    return "nf4" if method == "bitsandbytes" and model.config.quantization_config.load_in_4bit else method


def own_method(config: Any) -> str:
    """transformers' name of the method by which a checkpoint is quantized; empty if it is not."""
    own = getattr(config, "quantization_config", None)
    own = own if isinstance(own, dict) or own is None else own.to_dict()
    method = (own or {}).get("quant_method", "")
    return str(getattr(method, "value", method))


def _four_bits(config: Any, dtype: torch.dtype) -> Quantization:
    from transformers import BitsAndBytesConfig

    absent = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        raise ModelError(
            "Weights in 4 bits need bitsandbytes.", f"{' and '.join(absent)} {verb} not installed.", INSTALL
        )
    chosen = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    stored = config.get_text_config(decoder=True).dtype or torch.float32
    return Quantization("bitsandbytes", {"quantization_config": chosen}, 0.5 / stored.itemsize)


def _tensors(model: Any) -> Iterator[Tensor]:
    yield from (*model.parameters(), *model.buffers())
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)  # bitsandbytes keeps its constants beside the parameter
        yield from (value for value in vars(state).values() if isinstance(value, Tensor)) if state else ()
