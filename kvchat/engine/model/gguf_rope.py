"""The scaling of positions that a GGUF file names: transformers does not read it, and would rotate as without one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from kvchat.errors import ModelError
from kvchat.gguf_file import GgufFile, Tensor

DIVISORS, LONG_DIVISORS = "rope_freqs.weight", "rope_factors_"  # of each frequency, tensors that are no weights
# What Llama 3.1, 3.2 and 3.3 have beside a factor, by which llama.cpp's converter makes the divisors.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Scaling(NamedTuple):
    """llama.cpp's name of the kind, its factor, the context before it (0 if unnamed), and divisors of frequencies."""

    kind: str
    factor: float
    original: int
    divisors: tuple[float, ...]


def read(file: GgufFile) -> Scaling:
    """The scaling that ``file`` names."""
    values = {name.partition(".rope.")[2]: value for name, value in file.values.items() if ".rope." in name}
    kind = values.get("scaling.type", "linear")
    factor = values.get("scaling.factor") or values.get("scale_linear") or 1
    tensors = {one.name: one for one in file.tensors}
    if any(name.startswith(LONG_DIVISORS) for name in tensors):
        kind = "longrope"
    divisors = _floats(tensors[DIVISORS]) if DIVISORS in tensors else ()
    original = values.get("scaling.original_context_length", 0)
    return Scaling(str(kind), float(factor), int(original), divisors)


def apply(scaling: Scaling, config: Any, name: str) -> None:
    """Give transformers' ``config`` the scaling of the file ``name``; Gemma's sliding layers have none.

    Raises:
        ModelError: it is of a kind that cannot be given.
    """
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)
    if rope.get("rope_type") != "default":
        return
    if (factor := round(max(scaling.divisors, default=1), 3)) > 1:
        rope |= {"rope_type": "llama3", "factor": factor, **LLAMA3}
        if not _divides(config, scaling.divisors):
            raise _refusal(name, "by divisors that are not Llama 3's")
    elif scaling.kind == "longrope":
        raise _refusal(name, "by longrope")
    elif scaling.kind == "linear" and scaling.factor != 1:
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif scaling.kind == "yarn" and scaling.factor != 1:
        original = scaling.original or config.max_position_embeddings
        rope |= {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": original}


def _floats(tensor: Tensor) -> tuple[float, ...]:
    """The values of a tensor in float32, as these are written."""
    if tensor.kind != 0:
        raise ValueError(f"{tensor.name} is no float32")
    return tuple(np.fromfile(tensor.path, "<f4", math.prod(tensor.shape), offset=tensor.start).tolist())


def _divides(config: Any, divisors: tuple[float, ...]) -> bool:
    """True if transformers divides the frequencies of ``config`` by these."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(len(frequencies)) / len(frequencies))
    return len(divisors) == len(plain) and torch.allclose(plain / frequencies, torch.tensor(divisors), rtol=1e-3)


def _refusal(name: str, how: str) -> ModelError:
    return ModelError(
        f"{name} cannot be loaded.",
        f"It scales its positions {how}, which transformers does not read from a GGUF file.",
        "Take the model as safetensors.",
    )
