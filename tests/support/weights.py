"""Weights of models that exist only as descriptions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from kvchat.models.weights import LINEAR, Part, Weights


def linears(elements: int, dtype: str = "bfloat16", nbytes: int = 0, **fields: Any) -> Weights:
    """``elements`` elements of square matrices, 16 bits each unless ``nbytes`` is given."""
    size = 4096
    return Weights(nbytes or 2 * elements, dtype, {Part(LINEAR, size, size): elements // size**2}, **fields)


def save_headers(config: Any, folder: Path) -> None:
    """Save a causal language model of transformers' ``config`` in bfloat16: headers, and a hole instead of weights."""
    from transformers import AutoModelForCausalLM

    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in model.named_parameters():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
