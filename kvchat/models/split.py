"""A model over several GPUs: decoder layers that the first one has no room for lie on the others, part after part.

The first GPU has everything else, the K/V of all layers and their attention. So every mode, a switch, a prefill and
drafts do what they do on one GPU, and the others hold weights alone. A layer elsewhere projects and multiplies there:
its queries, keys and values come to the first GPU and what they attended to goes back, for a layer of an 8B model 12
and 8 KiB a token. The other way, each layer's K/V beside its weights, would save these copies. But most modes choose
once for all layers and keep one tensor of them (freeze's scores, streaming's sinks, the index), so that each of them
would have to be split too.

The other GPUs are filled first, because the room that is left on the first one is what K/V can have.
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

FORWARD = 2048  # tokens of a prompt that a GPU beside the first keeps room to read at once
KEPT = 8  # arguments of layers that are kept on a device: angles and positions are the same for many


class Shares(NamedTuple):
    """Bytes of the weights on the first GPU and on each of the others; ``places`` are the layers' devices."""

    first: int
    others: tuple[int, ...]
    places: tuple[torch.device, ...]


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder's layers, with their list's name in the model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return next((name, module) for name, module in lists if len(module) == count)


def shares(described: ModelDescription, quantize: str, given: Mapping[str, int] | None = None) -> Shares:
    """Where the weights lie; those on the first GPU need not fit it.

    ``given`` are bytes by device that count as free, because the model in use is unloaded.

    Raises:
        ModelError: this model cannot be split.
    """
    if described.others and RecurrentState(described.shapes.config).exists:
        raise ModelError(
            f"{described.location.name} cannot be split over several GPUs.",
            "Its recurrent layers keep a state, which kvchat saves and restores on one GPU only.",
            "Omit --gpus.",
        )
    layers, beside = layer_bytes(described, quantize)
    end, places = len(layers), [described.device] * len(layers)
    others = dict.fromkeys(described.others, 0)
    for device in reversed(described.others):
        free = available.free_bytes(device) + (given or {}).get(str(device), 0)
        room = available.usable(free) - described.activations(FORWARD)
        while end and others[device] + layers[end - 1] <= room:
            end -= 1
            others[device] += layers[end]
            places[end] = device
    return Shares(beside + sum(layers[:end]), tuple(others.values()), tuple(places))


def layer_bytes(described: ModelDescription, quantize: str) -> tuple[list[int], int]:
    """Bytes of each decoder layer, and of all that is none: on a GPU that is not packed."""
    _, layers = decoder_layers(described.shapes)
    elements = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    beside = sum(weight.numel() for weight in described.shapes.parameters()) - sum(elements)
    beside *= described.dtype.itemsize
    of_layers = max(0, described.loaded_bytes(quantize) - beside)
    return [of_layers * number // sum(elements) for number in elements], beside


def devices_of(model: Any, places: Sequence[torch.device]) -> dict[nn.Module, torch.device]:
    """The device of each module inside the layers of ``model``; none where there are no ``places``."""
    layers = decoder_layers(model)[1] if places else ()
    return {module: device for layer, device in zip(layers, places, strict=True) for module in layer.modules()}


def device_map(described: ModelDescription, places: Sequence[torch.device]) -> dict[str, torch.device]:
    """The devices of a model's parts by name, as transformers takes them."""
    name, _ = decoder_layers(described.shapes)
    return {"": described.device} | {f"{name}.{number}": place for number, place in enumerate(places)}


def move(model: Any, first: torch.device, places: Sequence[torch.device]) -> None:
    """Move the layers of ``model`` to ``places``, where there are any, and all else to ``first``."""
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
    """Let ``model``, whose layers are at ``places`` and all else is on ``first``, compute as on one device."""
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
    """A sentence for people about layers at ``places``; empty where there are none."""
    if not places:
        return ""
    parts = (f"{number} on {device}" for device, number in Counter(places).items())
    return f"Of {len(places)} layers are {', '.join(parts)}; all K/V and attention are on {first}."


class _Inputs:
    """Brings what a layer is given to its ``device``; what several layers are given, once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, tuple[Any, Any]] = {}

    def __call__(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _moved(given, self._device), {name: self._once(value) for name, value in named.items()}

    def _once(self, value: Any) -> Any:
        if not isinstance(value, Tensor | tuple):
            return value
        if id(value) not in self._kept:
            self._kept[id(value)] = value, _moved(value, self._device)  # held, so that no other has its id
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[id(value)][1]


def _moved(value: Any, device: torch.device) -> Any:
    """A layer's argument or result with its tensors on ``device``."""
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value
