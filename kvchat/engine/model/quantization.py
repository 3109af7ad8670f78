"""Quantized weights: 4 bits by bitsandbytes on request, and checkpoints that come quantized.

Everything is transformers' own: kvchat chooses the configuration and the device, and says which package is missing.
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
    """How the weights are kept: transformers' name of the method (empty: as numbers) and what loading needs to know.

    ``share`` is the part of the files' bytes that is left at least.
    """

    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0


def resolve(quantize: str, config: Any, dtype: torch.dtype) -> Quantization:
    """What a person chose (``CHOICES``), and what the checkpoint is; ``dtype`` is that of the arithmetic.

    Raises:
        UsageError: there is no such choice.
        ModelError: bitsandbytes is not installed, or the checkpoint is quantized already.
    """
    if quantize not in CHOICES:
        raise UsageError(f'There is no quantization "{quantize}".', did_you_mean(quantize, CHOICES))
    own = _own_method(config)
    if quantize == "none":
        return Quantization(own)
    if own:
        raise ModelError(
            f"The model is quantized already, by {own}.", "Its weights cannot be put into 4 bits again.", "Give none."
        )
    return _four_bits(config, dtype)


def missing(name: str, quantized: Quantization, error: ImportError) -> ModelError:
    """The refusal of a model for which a package is missing; transformers' message names it."""
    said = " ".join(str(error).split())[:300]
    hint = f"{INSTALL}, then try again." if "bitsandbytes" in quantized.method else "Install it, then try again."
    return ModelError(f"{name} needs a package that is not installed.", f"transformers says: {said}", hint)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights on its device, quantization constants included."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def is_packed(model: Any) -> bool:
    """Some weights are in a form that only its quantizer multiplies; a GGUF file's are usually unpacked."""
    kept = (torch.float32, torch.float16, torch.bfloat16)
    return bool(_own_method(model.config)) and any(tensor.dtype not in kept for tensor in _tensors(model))


def notes(model: Any) -> list[str]:
    """What a person should know of a loaded model's weights."""
    method, dtype = _own_method(model.config), str(model.dtype).removeprefix("torch.")
    return [f"The {method} weights were unpacked to {dtype}."] if method and not is_packed(model) else []


def describe(model: Any) -> str:
    """How a loaded model's weights are quantized; empty if they are not."""
    if not is_packed(model):
        return ""
    method = _own_method(model.config)
    return "nf4" if method == "bitsandbytes" and model.config.quantization_config.load_in_4bit else method


def _own_method(config: Any) -> str:
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
