"""Split a model over several GPUs: decoder layers move to the other GPUs, in order.

The first GPU keeps everything else, the K/V of all layers and their attention. So modes, switches, prefill and drafts
work as on one GPU; the other GPUs hold only weights. A layer on another GPU projects and multiplies there: its queries,
keys and values are copied to the first GPU and the result of attention back, 12 and 8 KiB per token for a layer of an
8B model. Storing each layer's K/V with its weights would save these copies. But most modes choose once for all layers
and keep one tensor for all (freeze's scores, streaming's sinks, the index), so each mode would have to be split too.

The other GPUs are filled first, because K/V get the memory that is left on the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvchat.errors import ModelError
from kvchat.kv.memory import available
from kvchat.models import attention_hook
from kvchat.models.description import ModelDescription
from kvchat.models.recurrent import RecurrentState

FORWARD = 2048  # prompt tokens per forward for which the other GPUs reserve memory
CACHED_INPUTS = 8  # arguments cached per device: many layers share the same angles and positions


class Shares(NamedTuple):
    """Bytes of the weights on the first GPU and on each of the others; ``places`` are the layers' devices."""

    first: int
    others: tuple[int, ...]
    places: tuple[torch.device, ...]


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the name of the decoder's list of layers in the model, and the list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return next((name, module) for name, module in lists if len(module) == count)


def shares(described: ModelDescription, quantize: str, unloaded: Mapping[str, int] | None = None) -> Shares:
    """Distribute the weights; the first GPU's share may be too large for it.

    ``unloaded`` are bytes by device that count as free, because the model in use will be unloaded.

    Raises:
        ModelError: this model cannot be split.
    """
    if described.others and RecurrentState(described.shapes.config).exists:
        raise ModelError(
            f"{described.location.name} cannot be split over several GPUs.",
            "Its recurrent layers keep a state, which kvchat saves and restores on one GPU only.",
            "Omit --gpus.",
        )
    layers, outside = layer_bytes(described, quantize)
    end, places = len(layers), [described.device] * len(layers)
    others = dict.fromkeys(described.others, 0)
    for device in reversed(described.others):
        free = available.free_bytes(device) + (unloaded or {}).get(str(device), 0)
        room = available.usable(free) - described.activations(FORWARD)
        while end and others[device] + layers[end - 1] <= room:
            end -= 1
            others[device] += layers[end]
            places[end] = device
    return Shares(outside + sum(layers[:end]), tuple(others.values()), tuple(places))


def layer_bytes(described: ModelDescription, quantize: str) -> tuple[list[int], int]:
    """Return the bytes of each decoder layer, and of everything outside the layers, which a GPU does not pack."""
    _, layers = decoder_layers(described.shapes)
    elements = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    outside = sum(weight.numel() for weight in described.shapes.parameters()) - sum(elements)
    outside *= described.dtype.itemsize
    of_layers = max(0, described.loaded_bytes(quantize) - outside)
    return [of_layers * number // sum(elements) for number in elements], outside


def devices_of(model: Any, places: Sequence[torch.device]) -> dict[nn.Module, torch.device]:
    """Return the device of each module inside the layers of ``model``; empty without ``places``."""
    layers = decoder_layers(model)[1] if places else ()
    return {module: device for layer, device in zip(layers, places, strict=True) for module in layer.modules()}


def device_map(described: ModelDescription, places: Sequence[torch.device]) -> dict[str, torch.device]:
    """Return transformers' device map: the device of each layer by name, and of everything else."""
    name, _ = decoder_layers(described.shapes)
    return {"": described.device} | {f"{name}.{number}": place for number, place in enumerate(places)}


def move(model: Any, first: torch.device, places: Sequence[torch.device]) -> None:
    """Move the layers of ``model`` to ``places``, if there are any, and everything else to ``first``."""
    if not places:
        model.to(first)
        return
    name, layers = decoder_layers(model)
    owner, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    for layer, device in zip(layers, places, strict=True):
        layer.to(device)
    setattr(owner, attribute, nn.ModuleList())
    model.to(first)
    setattr(owner, attribute, layers)


def connect(model: Any, first: torch.device, places: Sequence[torch.device]) -> None:
    """Make ``model`` compute as on one device although its layers are on ``places`` and the rest is on ``first``."""
    if not places:
        return
    _, layers = decoder_layers(model)
    inputs = {device: _Inputs(device) for device in set(places)}
    for layer, device in zip(layers, places, strict=True):
        if device != first:
            layer.register_forward_pre_hook(inputs[device], with_kwargs=True)
            attention_hook.attend_on(first, layer)
    layers[-1].register_forward_hook(lambda module, given, hidden: _moved(hidden, first))


def note(first: torch.device, places: Sequence[torch.device]) -> str:
    """Return a sentence for the user about the layers on ``places``; "" if there are none."""
    if not places:
        return ""
    parts = (f"{number} on {device}" for device, number in Counter(places).items())
    return f"Its {len(places)} layers are split: {', '.join(parts)}. All K/V and attention are on {first}."


class _Inputs:
    """A hook that moves a layer's arguments to its ``device``; arguments that several layers share are moved once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cached: dict[int, tuple[Any, Any]] = {}

    def __call__(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _moved(given, self._device), {name: self._once(value) for name, value in named.items()}

    def _once(self, value: Any) -> Any:
        if not isinstance(value, Tensor | tuple):
            return value
        if id(value) not in self._cached:
            self._cached[id(value)] = value, _moved(value, self._device)  # a reference, so that its id stays unique
            if len(self._cached) > CACHED_INPUTS:
                del self._cached[next(iter(self._cached))]
        return self._cached[id(value)][1]


def _moved(value: Any, device: torch.device) -> Any:
    """Return a layer's argument or result with its tensors on ``device``."""
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value
