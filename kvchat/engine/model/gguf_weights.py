"""The weights of GGUF files: transformers unpacks them while it reads; here they are packed again, about as small.

The file's own blocks have no kernels here. What was 4 bits becomes int4, or int8 where int4 cannot be multiplied, and
what was up to 8 bits int8: a Linear at a time, so that the device never holds the unpacked weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kvchat.engine.model import gguf_file, packed_experts, quantization
from kvchat.engine.model.checkpoint import ModelLocation
from kvchat.engine.model.description import ModelDescription
from kvchat.engine.model.packed_rows import body
from kvchat.engine.model.packing import PACKINGS
from kvchat.errors import ModelError

AT_MOST = {"int4": 5.0, "int8": 9.0}  # bits a weight of the layers, with its constants: those of Q4_K_M, of Q8_0
CHOICES = ("none", *AT_MOST)


class Choice(NamedTuple):
    """The quantization to use, and what a person should know of it; empty for nothing."""

    quantize: str
    note: str = ""


def choose(quantize: str, described: ModelDescription) -> Choice:
    """The quantization for the setting ``quantize``; "auto": the file's own size if what packs it is installed.

    For what is no GGUF file "auto" is "none".

    Raises:
        ModelError: the GGUF file is damaged, or its weights cannot be packed so.
    """
    if described.location.gguf and quantize in {*quantization.CHOICES} - {"auto", *CHOICES}:
        raise ModelError(
            f"{described.location.name} is a GGUF file.",
            f"Its weights cannot be made {quantize}.",
            f"Give --quantize {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, or leave it out.",
        )
    if quantize != "auto":
        return Choice(quantize)
    small = by_default(described.location, described.dtype, described.device)
    if not small:
        return Choice("none")
    if absent := quantization.absent_packages(small, described.device):
        packages = " and ".join(absent)
        return Choice(
            "none", f"With {packages} its weights would stay small, in {small}: {quantization.INSTALL[small]}."
        )
    return Choice(small, f"The GGUF file's weights are kept in {small}; --quantize none unpacks them.")


def by_default(location: ModelLocation, dtype: torch.dtype, device: torch.device) -> str:
    """The quantization that keeps a file about as small as it is; empty for large ones and what is no GGUF file.

    Raises:
        ModelError: the GGUF file is damaged.
    """
    if not location.gguf:
        return ""
    of_file, there = bits(location), quantization.possible(device, dtype)
    return next((name for name, most in AT_MOST.items() if of_file <= most and name in there), "")


@contextmanager
def unpacked() -> Iterator[dict[str, Any]]:
    """While a file is read transformers takes no kernels, which it would download from the hub and run.

    Gives the options for ``from_pretrained`` with which all weights are unpacked.
    """
    try:
        from transformers import GgufConfig
        from transformers.integrations.gguf import kernels
    except ImportError:  # before 5.23 it always unpacks
        yield {}
        return
    own = kernels.kernelize_ggml_layers
    kernels.kernelize_ggml_layers = lambda model: None  # is called whatever the options are
    try:
        yield {"quantization_config": GgufConfig(dequantize=True)}
    finally:
        kernels.kernelize_ggml_layers = own


def pack(model: Any, config: Any, device: torch.device) -> None:
    """Quantize the Linears of ``model`` but its head by transformers' ``config``, each on ``device``.

    On a CPU also its experts.
    """
    model.config.quantization_config = config
    method = config.quant_method
    if method in PACKINGS:
        for linear in PACKINGS[method].linears(model):
            PACKINGS[method].pack(linear, of_4_bits=True)
        for _, stack in packed_experts.chosen(model, method):
            packed_experts.pack(stack.module, stack.name, stack.weight.detach(), method, of_4_bits=True)
        return
    from torchao.quantization import quantize_

    for linear in body(model):
        quantize_(linear.to(device), config.quant_type, filter_fn=lambda module, name: True)


def bits(location: ModelLocation) -> float:
    """Bits that a weight of the layers' matrices takes in the file; 0 for what is no GGUF file.

    Raises:
        ModelError: the GGUF file is damaged.
    """
    if not location.gguf:
        return 0.0
    return gguf_file.header(location.folder / location.gguf).layer_bits
