"""Bytes that the weights of a model take once it is loaded, by quantization, told before they are read."""

from __future__ import annotations

from kvchat import stored_tensors
from kvchat.engine.model import quantization, repacking
from kvchat.engine.model.description import ModelDescription
from kvchat.engine.model.weight_sizes import packed_bytes, weight_bytes


def by_quantization(described: ModelDescription) -> dict[str, int]:
    """Bytes of the weights by quantization; a checkpoint that stays as it is quantized has only its own.

    Raises:
        ModelError: a file is missing or damaged.
    """
    own, is_unpacked = quantization.own_method(described.config), repacking.is_unpacked(described)
    if own and not is_unpacked:
        return {own: loaded_bytes(described, own)}
    possible = quantization.possible(described.device, described.dtype)
    return {name: loaded_bytes(described, name) for name in possible if name in repacking.CHOICES or not is_unpacked}


def loaded_bytes(described: ModelDescription, quantize: str) -> int:
    """Bytes of the weights that ``quantize`` leaves, of a checkpoint that stays as it is quantized its own.

    Raises:
        ModelError: as ``by_quantization``.
    """
    config, shapes, device = described.config, described.shapes, described.device
    if repacking.is_unpacked(described) or not quantization.own_method(config):
        return weight_bytes(shapes, quantize, device)
    if device.type == "cpu" and quantization.kind_of(config) == "int8":
        return weight_bytes(shapes, "int8", device)  # and its head is packed too
    packed = stored_tensors.packed(described.stored, quantization.own_section(config))
    return packed_bytes(shapes, packed)
