"""Estimate from the headers of a model's files if its weights fit this machine; ``kvchat plan`` is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvchat import nvml, stored_tensors
from kvchat.catalog.headers import ITEM_BYTES, Weights
from kvchat.catalog.models import FoundModel
from kvchat.catalog.tensor_kinds import Elements
from kvchat.config import profiles
from kvchat.kv.memory import available

# Bytes an element of quantized weights takes, with their constants.
NF4 = 0.5 + 4 / 64
QUANTIZED = {
    "cpu": {"int8": 1 + 2 / 32, "nf4": NF4, "int4": 0.5 + 4 / 32},
    "cuda": {"int8": 1.0, "nf4": NF4, "int4": 0.5 + 4 / 128},
}
# In what weights that loading unpacks are packed again by default, by their bits an element of the layers in the files:
# as in the engine's ``repacking``.
AT_MOST = {"int4": 5.0, "int8": 9.0}

# As in the engine: of a GPU that multiplies int4, and of the smallest matrix that is faster in bfloat16.
INT4_CAPABILITY, BFLOAT16_FROM = (8, 0), 2**24
OWN_DTYPE_ONLY = ("torchao", "int4")  # kinds of checkpoints that are multiplied in no other


@dataclass(frozen=True)
class Room:
    """Free memory in bytes of the device that the settings name, "cpu" or "cuda", and the GPU's compute capability."""

    device: Literal["cpu", "cuda"]
    free: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Fit:
    """Bytes that the weights take once loaded. ``quantize`` is the least that makes them fit, None: nothing does."""

    needed: int
    quantize: str | None


def room(device: str, released: int = 0) -> Room:
    """Bytes free on ``device`` (as in the settings), with the ``released`` ones that the model in use takes."""
    if profiles.read_gpu(device) is not None:
        reader = nvml.visible_gpu(int(device.partition(":")[2] or 0))
        usage, info = (reader.usage(), reader.info()) if reader else (nvml.GpuUsage(), nvml.GpuInfo())
        if usage.total is not None and usage.used is not None:
            return Room("cuda", usage.total - usage.used + released, info.compute_capability)
    return Room("cpu", available.host_free() + released)


def fit(found: FoundModel, dtype: str, there: Room) -> Fit | None:
    """The fit of the weights, loaded in ``dtype`` (as in the settings); None where their headers could not be read."""
    if found.weights is None:
        return None
    usable, by_choice = available.usable(there.free), needs(found, found.weights, dtype, there)
    if not _is_unpacked(found, there):
        return _first(by_choice, usable)
    return _unpacked_fit(_default(found.weights, by_choice, there), by_choice, usable)


def needs(found: FoundModel, weights: Weights, dtype: str, there: Room) -> dict[str, int]:
    """Bytes that the weights take once loaded in ``dtype``, by quantization; "none" leaves them as they are."""
    chosen = _dtype(found, weights, dtype, there)
    item = ITEM_BYTES.get(chosen, 2)  # what is unpacked becomes bfloat16
    is_unpacked = _is_unpacked(found, there)
    if found.quantization and not is_unpacked:
        return {"none": _own_bytes(weights, found.quantization, item, there)}
    no_int4 = there.device != "cpu" and (
        chosen != "bfloat16" or (there.capability or INT4_CAPABILITY) < INT4_CAPABILITY
    )
    refused = {"int4"} if no_int4 else set()
    if is_unpacked:
        refused.add("nf4")  # is not made of what was packed
    chosen_from = [name for name in _quantized(there) if name not in refused]
    packed = {name: _packed_bytes(weights, name, item, there) for name in chosen_from}
    return {"none": weights.elements * item, **packed}


def _packed_bytes(weights: Weights, quantize: str, item: int, there: Room) -> int:
    """Bytes of weights whose Linears are packed; on a CPU experts too, and the head, which may be the embedding."""
    plain, each = weights.plain, _quantized(there)[quantize]
    linear, experts = _linear_and_experts(weights)
    packed, head = linear, 0
    if there.device == "cpu" and quantize != "nf4":
        packed += experts
        head = _packed_head(plain, item) if quantize == "int8" or plain.head is not None else 0
    return (weights.elements - packed) * item + int(packed * each) + head


def _quantized(there: Room) -> dict[str, float]:
    return QUANTIZED[there.device.partition(":")[0]]


def _packed_head(plain: Elements, item: int) -> int:
    """Bytes that a head in int8 adds."""
    each = QUANTIZED["cpu"]["int8"]
    return int(plain.embedding * each if plain.head is None else plain.head * (each - item))


def _own_bytes(weights: Weights, method: str, item: int, there: Room) -> int:
    """Bytes of a checkpoint that stays as it is quantized; what is not packed takes ``item`` bytes an element."""
    head = _packed_head(weights.plain, item) if method == "int8" and there.device == "cpu" else 0
    return weights.packed_bytes + (weights.elements - weights.packed_elements) * item + head


def _is_unpacked(found: FoundModel, there: Room) -> bool:
    """True if loading unpacks the weights, which are packed again."""
    return found.kind == "GGUF" or stored_tensors.is_unpacked(found.quantization, there.capability)


def _linear_and_experts(weights: Weights) -> tuple[int, int]:
    """Elements of the Linears but the head, and of a mixture's experts; what is packed in the files is of either."""
    experts = weights.plain.experts + weights.packed_experts
    return weights.plain.linear + weights.packed_elements - weights.packed_experts, experts


def _default(weights: Weights, by_choice: dict[str, int], there: Room) -> str:
    """In what small weights are packed again by default: not where most are experts, which a GPU's packers leave."""
    linear, experts = _linear_and_experts(weights)
    if there.device != "cpu" and experts >= linear:
        return "none"
    bits = weights.layer_bits
    return next((name for name, most in AT_MOST.items() if 0 < bits <= most and name in by_choice), "none")


def _unpacked_fit(default: str, by_choice: dict[str, int], usable: int) -> Fit:
    """The fit of weights that loading unpacks, and packs again in ``default``."""
    needed = by_choice[default]
    found = _first({default: needed} | {name: size for name, size in by_choice.items() if size < needed}, usable)
    return Fit(found.needed, "none") if found.quantize == default else found


def _first(by_choice: dict[str, int], usable: int) -> Fit:
    """The first that fits; the first of all is what is needed."""
    needed = next(iter(by_choice.values()))
    return Fit(needed, next((name for name, bytes_ in by_choice.items() if bytes_ <= usable), None))


def _dtype(found: FoundModel, weights: Weights, dtype: str, there: Room) -> str:
    """The dtype of the arithmetic, for the setting ``dtype``; on a CPU as the engine's ``cpu_dtype`` chooses."""
    own = weights.dtype if weights.dtype in ITEM_BYTES else "bfloat16"
    if dtype != "auto" or there.device != "cpu" or found.quantization in OWN_DTYPE_ONLY:
        return own if dtype == "auto" else dtype
    packed = found.quantization and not _is_unpacked(found, there)
    return "float32" if packed or own != "bfloat16" or 4 * weights.mlp < BFLOAT16_FROM else "bfloat16"
