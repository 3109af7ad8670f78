"""The scaling of positions that a GGUF file names: transformers does not read it, and would rotate as without one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvchat.errors import ModelError

DIVISORS, LONG_DIVISORS = "rope_freqs.weight", "rope_factors_"  # of each frequency, tensors that are no weights
# What Llama 3.1, 3.2 and 3.3 have beside a factor, by which llama.cpp's converter makes the divisors.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Scaling(NamedTuple):
    """llama.cpp's name of the kind, its factor, the context before it (0 if unnamed), and divisors of frequencies."""

    kind: str
    factor: float
    original: int
    divisors: tuple[float, ...]


def read(reader: Any) -> Scaling:
    """The scaling that a file names, read by the package's ``reader``."""
    rope = {name: field for name, field in reader.fields.items() if ".rope." in name}
    values: dict[str, Any] = {name.partition(".rope.")[2]: field.contents() for name, field in rope.items()}
    kind = values.get("scaling.type", "linear")
    factor = values.get("scaling.factor") or values.get("scale_linear") or 1
    tensors = {one.name: one for one in reader.tensors}
    if any(name.startswith(LONG_DIVISORS) for name in tensors):
        kind = "longrope"
    divisors = tensors[DIVISORS].data.tolist() if DIVISORS in tensors else ()
    original = values.get("scaling.original_context_length", 0)
    return Scaling(str(kind), float(factor), int(original), tuple(divisors))


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
