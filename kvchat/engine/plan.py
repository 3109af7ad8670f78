"""What a model will take before it is loaded: weights, K/V by mode, host pool, recurrent state, against what is free.

The model is built on torch's meta device, where tensors have shapes and no memory, and one token runs through it: so
the shapes of its K/V and of its state are observed as the probe does, and no weight file is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from kvchat.config import modes
from kvchat.engine.generate.runner import CHUNK, GROWTH_HEADROOM
from kvchat.engine.model import attention_hook, quantization, supported
from kvchat.engine.model.checkpoint import Progress, complete, locate
from kvchat.engine.model.device import resolve_device, resolve_dtype
from kvchat.engine.model.load import quiet, read_config
from kvchat.engine.model.probe import observe_shape
from kvchat.engine.model.recurrent_state import SNAPSHOTS, RecurrentState, attending_layers
from kvchat.errors import KvchatError, UsageError
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available, budget
from kvchat.kv.memory.arrangement import layer_bytes
from kvchat.kv.memory.prefill_plan import staging_bytes
from kvchat.kv.modes import build
from kvchat.kv.modes.base import ModelTraits
from kvchat.protocol.figures import Params

# What is given up last is first: reading less costs some answers, 8 bits little, 4 bits more.
PROPOSED_MODES = ("full", "speculative", "streaming")
PROPOSED_WEIGHTS = ("none", "int8", "nf4")
# Bytes a weight takes beside its own bits: torchao's scale and zero point a row, bitsandbytes' scale for 64 weights.
ROW_BYTES = {"int8": 5}
WEIGHT_BYTES = {"int8": 1.0, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 4 / 64}


class ModeNeed(NamedTuple):
    """A mode's K/V on the device, with the parameters in force; ``refusal`` says why it cannot be entered.

    In freeze and sync it is the most: what freezes and which heads retrieve turns out later.
    """

    device_bytes: int
    params: Params
    refusal: str = ""


class Proposal(NamedTuple):
    """What fits with the least given up; ``gave_up`` says what that is."""

    quantize: str
    mode: str
    gave_up: tuple[str, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, for a conversation of ``context`` tokens.

    ``weights`` by quantization and ``modes`` lie on the device, with ``state`` and ``workspace`` (the last is an
    estimate); ``host_pool`` and ``snapshots`` in host memory. On a CPU both are the same memory. ``proposal`` is None
    where nothing fits.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    context: int
    weights: Mapping[str, int]
    modes: Mapping[str, ModeNeed]
    state: int
    workspace: int
    host_pool: int
    snapshots: int
    device_free: int
    host_free: int

    @property
    def proposal(self) -> Proposal | None:
        """The first combination that fits, the best first."""
        for quantize in [name for name in PROPOSED_WEIGHTS if name in self.weights]:
            for mode in [name for name in PROPOSED_MODES if not self.modes[name].refusal]:
                if self.fits(quantize, mode):
                    return Proposal(quantize, mode, tuple(_given_up(self, quantize, mode)))
        return None

    def fits(self, quantize: str, mode: str) -> bool:
        """Whether all of it fits what is free, with the margin that is always left."""
        on_device = self.weights[quantize] + self.modes[mode].device_bytes + self.state + self.workspace
        on_host = self.host_pool + self.snapshots
        if self.device == "cpu":
            return on_device + on_host <= available.usable(self.host_free)
        return on_device <= available.usable(self.device_free) and on_host <= available.usable(self.host_free)


def memory_plan(
    model: str,
    device: str,
    dtype: str,
    context: int | None,
    mode_params: Mapping[str, Params],
    progress: Progress,
) -> MemoryPlan:
    """Plan for a conversation of ``context`` tokens, by default as long as the model allows.

    Raises:
        ModelError: the model cannot be found or run; UsageError: an unknown device, dtype or parameter, or a context
            that the model does not have.
    """
    on = resolve_device(device)
    location = locate(model, progress)
    with quiet():
        config = read_config(location)
        model_class, text_config = supported.model_class(config)
        precision = resolve_dtype(dtype, config, on)
        own = quantization.own_method(config)
        packed = {own: complete(location, progress).weight_bytes} if own and not location.gguf else {}
        shapes = _without_memory(model_class, text_config, precision)
        state = RecurrentState(shapes.config)
        shape = observe_shape(shapes, state)
    longest = int(shapes.config.get_text_config(decoder=True).max_position_embeddings)
    tokens = longest if context is None else context
    if not 0 < tokens <= longest:
        raise UsageError(f"A context of {tokens:,} tokens is refused.", f"{model} was made for 1 to {longest:,}.")
    layers = len(attending_layers(shapes.config))
    geometry = Geometry(layers, *shape, precision, headroom=GROWTH_HEADROOM[on.type], unified=on.type == "cpu")
    return MemoryPlan(
        model=model,
        architecture=model_class.__name__,
        device=str(on),
        dtype=str(precision).removeprefix("torch."),
        context=tokens,
        weights=packed or {name: _weight_bytes(shapes, name, on) for name in _choices(on, precision)},
        modes={name: _mode_need(name, mode_params, geometry, longest, tokens) for name in modes.mode_names()},
        state=state.nbytes,
        workspace=_workspace(shapes, geometry, tokens, on),
        host_pool=layers * layer_bytes(geometry, geometry.grown(tokens + 1)),
        snapshots=SNAPSHOTS * state.nbytes,
        device_free=budget.free_bytes(on),
        host_free=available.host_free(),
    )


# ---- parts -----------------------------------------------------------------------------------------


def _without_memory(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    attention_hook.register()
    with torch.device("meta"):
        # Of transformers' ways to run experts this one asks no tensor for its values, which have none.
        return model_class._from_config(
            config, dtype=dtype, attn_implementation=attention_hook.NAME, experts_implementation="batched_mm"
        ).eval()


def _choices(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    int4 = device.type == "cuda" and dtype == torch.bfloat16
    return tuple(name for name in quantization.CHOICES if name != "int4" or int4)


def _weight_bytes(model: Any, quantize: str, device: torch.device) -> int:
    """Bytes of the weights and buffers; only Linears are quantized, the head on a CPU in int8 too."""
    total: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if quantize == "none":
        return total
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    for linear in _linears(model):
        if linear is not head or (quantize == "int8" and device.type == "cpu"):
            rows, columns = linear.weight.shape
            total += int(rows * (columns * WEIGHT_BYTES[quantize] + ROW_BYTES.get(quantize, 0)))
            total -= 0 if linear is head and tied else linear.weight.nbytes
    return total


def _linears(model: Any) -> Iterator[nn.Linear]:
    return (module for module in model.modules() if type(module) is nn.Linear)


def _mode_need(name: str, mode_params: Mapping[str, Params], geometry: Geometry, longest: int, tokens: int) -> ModeNeed:
    """Without the rotations and head scores that only a loaded model tells."""
    try:
        traits = ModelTraits(longest, (None,) * geometry.layers)
        mode = build(modes.parse(name, mode_params.get(name, {})), geometry, traits)
        needed = mode.plan(geometry.grown(tokens + 1)).device_bytes(geometry)
        chosen = {"budget": getattr(mode, "budget", None), "sink": mode.sink, "window": mode.window}
        return ModeNeed(needed, {name: value for name, value in chosen.items() if value})
    except KvchatError as error:
        return ModeNeed(0, {}, str(error))


def _workspace(model: Any, geometry: Geometry, tokens: int, device: torch.device) -> int:
    """What one prefill forward takes, about: the outputs of one layer's Linears, and on a GPU a layer's K/V."""
    count: int = model.config.get_text_config(decoder=True).num_hidden_layers
    widths = sum(linear.out_features for linear in _linears(model.get_decoder())) // count
    activations = CHUNK * widths * geometry.dtype.itemsize
    staged = staging_bytes(geometry, max(0, tokens - CHUNK), CHUNK) + PREFILL_WORKSPACE
    return activations + (staged if device.type == "cuda" else 0)


def _given_up(plan: MemoryPlan, quantize: str, mode: str) -> Iterator[str]:
    if quantize != "none" and quantize in quantization.BITS:
        yield f"precision of the weights: {quantization.BITS[quantize]} bits instead of {plan.dtype}"
    if mode == "streaming":
        yield "everything between the first tokens and the window"
    elif mode != "full":
        yield f"reading everything for every token: {mode} chooses what to read"
