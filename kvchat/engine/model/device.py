"""Resolves the settings "device" and "dtype" to torch's objects."""

from __future__ import annotations

from typing import Any

import torch

from kvchat.engine.model.cpu_dtype import auto_dtype
from kvchat.errors import UsageError, did_you_mean

OVERFLOWING = "gemma3"  # begins the kinds of models whose numbers are too large for float16, as their makers say
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(device: str) -> torch.device:
    """The torch device of a setting; "auto" is CUDA where there is a GPU.

    Raises:
        UsageError: there is no such device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        resolved = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f'There is no device "{device}".', "", "Give auto, cpu, cuda or cuda:0.") from None
    if resolved.type not in ("cpu", "cuda"):
        raise UsageError(f'kvchat does not run on "{device}".', "", "Give auto, cpu, cuda or cuda:0.")
    if resolved.type == "cpu":
        return torch.device("cpu")
    return _cuda_device(device, resolved.index or 0)


def overflows(name: str) -> UsageError:
    """The refusal of float16 for a model whose numbers are too large for it."""
    return UsageError(
        f"{name} does not run in float16.",
        "Between its layers it has numbers above 65,504, the largest there is in float16.",
        "Give --dtype bfloat16, float32 or auto.",
    )


def resolve_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """The torch dtype of a setting; "auto" is the dtype of transformers' ``config`` on CUDA, on a CPU the faster one.

    Raises:
        UsageError: there is no such dtype, or the model's numbers are too large for it.
    """
    if dtype == "float16" and _overflows(config):
        raise overflows(config.model_type)
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise UsageError(f'There is no dtype "{dtype}".', did_you_mean(dtype, ["auto", *DTYPES]))
    own = config.get_text_config(decoder=True).dtype or config.dtype
    if device.type == "cpu":
        return auto_dtype(own, config)
    if own == torch.float16 and _overflows(config):
        return torch.float32
    return own if own in DTYPES.values() else torch.float32


def _overflows(config: Any) -> bool:
    return str(config.get_text_config(decoder=True).model_type).startswith(OVERFLOWING)


def _cuda_device(given: str, index: int) -> torch.device:
    if index < torch.cuda.device_count():
        return torch.device("cuda", index)
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU"
        raise UsageError(f'There is no device "{given}".', f"{why}.", "Give auto or cpu.")
    raise UsageError(
        f'There is no device "{given}".',
        f"This machine has {torch.cuda.device_count()} GPU(s).",
        "Give one of these, or auto.",
    )
