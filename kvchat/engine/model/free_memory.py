"""Refuses weights that do not fit the free memory, before minutes of reading them."""

from __future__ import annotations

import torch

from kvchat.engine.model.checkpoint import Checkpoint
from kvchat.engine.model.description import ModelDescription
from kvchat.engine.model.weight_sizes import weight_bytes
from kvchat.errors import DoesNotFitError
from kvchat.kv.memory import available
from kvchat.units import size


def check(found: Checkpoint, described: ModelDescription, share: float) -> None:
    """Refuse weights of which not even ``share`` of the files' size fits, and a GGUF file too large to be unpacked.

    Raises:
        DoesNotFitError
    """
    device = described.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available.host_free()
    if found.weight_bytes * share > free:
        raise does_not_fit(found, device)
    if found.gguf:
        _check_unpacked(found, described)


def does_not_fit(found: Checkpoint, device: torch.device) -> DoesNotFitError:
    """The refusal of weights that do not fit the ``device``."""
    if device.type == "cpu":
        return DoesNotFitError(
            f"{found.name} does not fit this machine's memory.",
            f"Its weights take {size(found.weight_bytes, 2)} on disk, and {size(available.host_free(), 2)} are free.",
            "Choose a smaller model or --quantize int8, or end what else takes memory. --force loads it anyway.",
        )
    free, total = torch.cuda.mem_get_info(device)
    return DoesNotFitError(
        f"{found.name} does not fit {torch.cuda.get_device_name(device)}.",
        f"Its weights take {size(found.weight_bytes, 2)}, and {size(free, 2)} of {size(total, 2)} are free.",
        "Choose a smaller model, or free memory on the GPU. --force loads it anyway.",
    )


def _check_unpacked(found: Checkpoint, described: ModelDescription) -> None:
    """A GGUF file is read as a whole into this machine's memory, unpacked, before it is packed again."""
    unpacked, free = weight_bytes(described.shapes, "none", described.device), available.host_free()
    if unpacked > free:
        raise DoesNotFitError(
            f"{found.name} does not fit this machine's memory while it is read.",
            f"Unpacked its weights take {size(unpacked, 2)}, and {size(free, 2)} are free.",
            "Take it as safetensors with --quantize, which are packed one by one, or end what else takes memory. "
            "--force loads it anyway.",
        )
