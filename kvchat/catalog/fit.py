"""Estimate from the headers of a model's files if its weights fit this machine; ``kvchat plan`` is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvchat import nvml, stored_tensors
from kvchat.catalog.headers import ITEM_BYTES, Weights
from kvchat.catalog.models import FoundModel
from kvchat.config import profiles
from kvchat.kv.memory import available

# Bytes an element of quantized weights takes, with their constants.
QUANTIZED = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
INT4 = {"cpu": 0.5 + 4 / 32, "cuda": 0.5 + 4 / 128}
# In what a GGUF file of at most so many bits an element is loaded by itself, as in the engine's ``gguf_weights``.
GGUF_AT_MOST = {"int4": 5.0, "int8": 9.0}


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
    weights = found.weights
    if weights is None:
        return None
    usable = available.usable(there.free)
    item = _item_bytes(weights.dtype, dtype, there)
    if found.quantization:
        return _first({"none": _own_bytes(weights, found.quantization, item, there)}, usable)
    needed = weights.elements * item
    by_choice = {"none": needed, **{name: int(weights.elements * item) for name, item in QUANTIZED.items()}}
    if there.device == "cpu" or dtype in ("auto", "bfloat16"):
        by_choice["int4"] = int(weights.elements * INT4[there.device.partition(":")[0]])
    if found.kind != "GGUF":
        return _first(by_choice, usable)
    del by_choice["nf4"]  # is not made of one
    return _gguf_fit(8 * weights.nbytes / weights.elements, by_choice, usable)


def _own_bytes(weights: Weights, method: str, item: int, there: Room) -> int:
    """Bytes of a checkpoint that is quantized already; what is not packed takes ``item`` bytes an element."""
    if stored_tensors.is_unpacked(method, there.capability):
        return weights.elements * item
    return weights.packed_bytes + (weights.elements - weights.packed_elements) * item


def _gguf_fit(bits: float, by_choice: dict[str, int], usable: int) -> Fit:
    """The fit of a GGUF file with so many ``bits`` an element: a small one is packed by itself."""
    default = next((name for name, most in GGUF_AT_MOST.items() if bits <= most and name in by_choice), "none")
    found = _first({name: size for name, size in by_choice.items() if size <= by_choice[default]}, usable)
    return Fit(found.needed, "none") if found.quantize == default else found


def _first(by_choice: dict[str, int], usable: int) -> Fit:
    """The first that fits; the first of all is what is needed."""
    needed = next(iter(by_choice.values()))
    return Fit(needed, next((name for name, bytes_ in by_choice.items() if bytes_ <= usable), None))


def _item_bytes(own: str, dtype: str, there: Room) -> int:
    if dtype == "auto":
        dtype = "float32" if there.device == "cpu" else own
    return ITEM_BYTES.get(dtype, 2)  # what is unpacked becomes bfloat16
