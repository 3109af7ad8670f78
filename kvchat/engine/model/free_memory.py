"""Refuses weights that do not fit the free memory, before minutes of reading them."""

from __future__ import annotations

import torch

from kvchat.engine.model import repacking
from kvchat.engine.model.description import ModelDescription
from kvchat.engine.model.loaded_sizes import by_quantization, loaded_bytes
from kvchat.engine.model.weight_sizes import weight_bytes
from kvchat.errors import DoesNotFitError
from kvchat.kv.memory import available
from kvchat.kv.memory.budget import free_bytes
from kvchat.units import size


def check(described: ModelDescription, quantize: str) -> None:
    """Refuse weights that do not fit the device once loaded, and those too large to be unpacked.

    Raises:
        DoesNotFitError; ModelError: a file is missing or damaged.
    """
    if loaded_bytes(described, quantize) > free_bytes(described.device):
        raise does_not_fit(described, quantize)
    if repacking.lie_unpacked(described, quantize):
        _check_unpacked(described)


def does_not_fit(described: ModelDescription, quantize: str) -> DoesNotFitError:
    """The refusal of weights that do not fit their device, with how they would."""
    device, free, needed = described.device, free_bytes(described.device), loaded_bytes(described, quantize)
    where, total = "this machine's memory", ""
    if device.type == "cuda":
        where, total = torch.cuda.get_device_name(device), f" of {size(torch.cuda.mem_get_info(device)[1], 2)}"
    return DoesNotFitError(
        f"{described.location.name} does not fit {where}.",
        f"Its weights take {size(needed, 2)}, and {size(free, 2)}{total} are free.",
        f"Choose a smaller model{_packed(described, min(free, needed - 1))}, or end what else takes memory there. "
        "--force loads it anyway.",
    )


def _packed(described: ModelDescription, room: int) -> str:
    """`` or --quantize int8 (5.1 GiB)`` for the first quantization whose weights have room; else nothing."""
    fitting = ((name, nbytes) for name, nbytes in by_quantization(described).items() if nbytes <= room)
    return next((f" or --quantize {name} ({size(nbytes)})" for name, nbytes in fitting), "")


def _check_unpacked(described: ModelDescription) -> None:
    """Refuse weights that do not fit this machine's memory, unpacked, before they are packed again."""
    unpacked, free = weight_bytes(described.shapes, "none", described.device), available.host_free()
    if unpacked > free:
        raise DoesNotFitError(
            f"{described.location.name} does not fit this machine's memory while it is read.",
            f"Unpacked its weights take {size(unpacked, 2)}, and {size(free, 2)} are free.",
            "Take the safetensors that are not quantized with --quantize: they are packed one by one. Or end what else "
            "takes memory. --force loads it anyway.",
        )
