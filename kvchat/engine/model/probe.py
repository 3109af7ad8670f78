"""The probe: a model's head counts and sizes, attention rules and key rotation, observed in one-token forwards.

With one key the softmax is 1 and attention returns that key's value, whatever the position. So in a model whose
positions are rotary, one token's hidden states are the same at every position, and one forward at position p yields
every layer's key of the same token at p. Comparing a few positions with the rotations that the model's ``inv_freq``
buffers allow identifies each layer's. No model name and no configuration field is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvchat.engine.model import attention_hook, tolerances
from kvchat.engine.model.attention_hook import Shape
from kvchat.engine.model.recurrent_state import RecurrentState, attending_layers
from kvchat.engine.model.supported import cannot_run, keeping_state
from kvchat.engine.model.unknown_values import UnknownValues
from kvchat.kv.attention_spec import AttentionSpec
from kvchat.kv.rope import Rotation, cos_sin, rotate

BASE = 11
NEAR = (3, 34)


@dataclass(frozen=True, eq=False)
class Probe:
    """A model's attention as observed. ``d_k`` and ``d_v`` are the sizes of one head's key and value.

    ``specs`` has one entry per layer that attends. ``rotations`` too, None for a layer without positions and the same
    object for layers that turn alike; it is empty where keys cannot be moved to other positions, and ``refusal`` says
    why. Layers that are ``unlike`` each other are given the largest shape of all.
    """

    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    specs: tuple[AttentionSpec, ...]
    rotations: tuple[Rotation | None, ...]
    refusal: str | None
    unlike: bool = False


def probe(model: Any) -> Probe:
    """Observe ``model`` (loaded with kvchat's attention) in at most five one-token forwards.

    Raises:
        ModelError: the layers cannot be given one shape, or others attend than the configuration says.
    """
    base = _observe(model, BASE)
    attending = _check_attending(model, base)
    common = _common(model, set(base.shapes.values()))
    if common or attending != list(range(len(attending))):
        attention_hook.unify_layers(model, attending, common)
        base = _observe(model, BASE)
    q_heads, kv_heads, d_k, d_v = base.shapes[0]
    rotations, refusal = _rotations(model, base)
    specs = tuple(base.specs[layer] for layer in range(len(attending)))
    kept = rotations if refusal is None else ()
    return Probe(q_heads, kv_heads, d_k, d_v, specs, kept, refusal, common is not None)


def observe_shape(model: Any, state: RecurrentState) -> Shape:
    """The shape of every layer's heads, from one token that also gives ``state`` its size; works on the meta device.

    Raises:
        ModelError: the layers cannot be given one shape, or keep state where it cannot be copied.
    """
    with keeping_state(model, state), UnknownValues():
        observer = _observe(model, 0, state)
    shapes = set(observer.shapes.values())
    return _common(model, shapes) or shapes.pop()


def pin_frequencies(model: Any) -> bool:
    """Fix rotary frequencies that follow the text's length at those of the whole context; False if none do.

    longrope picks one of two sets by the positions of each forward, so the chunks of one long prompt would be rotated
    by both.
    """
    rotary = [module for module in model.modules() if _follows_length(module)]
    if rotary:
        _observe(model, _context(model) - 1)
    for module in rotary:
        kinds = module.rope_type
        module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    return bool(rotary)


class _Observer:
    """An ``AttentionBackend`` for one token: records its arguments and attends to the token itself."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.specs: dict[int, AttentionSpec] = {}
        self.shapes: dict[int, Shape] = {}

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.keys[layer], self.values[layer], self.specs[layer] = key[:, 0].float(), value[:, 0].float(), spec
        self.shapes[layer] = Shape(query.shape[0], key.shape[0], key.shape[2], value.shape[2])
        return value.repeat_interleave(query.shape[0] // key.shape[0], 0)


def _context(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).max_position_embeddings)


def _follows_length(module: Any) -> bool:
    kinds = getattr(module, "rope_type", None) or ()
    listed = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in kind or kind == "longrope" for kind in listed)


def _observe(model: Any, position: int, state: RecurrentState | None = None) -> _Observer:
    observer = _Observer()
    token = torch.tensor([model.get_input_embeddings().num_embeddings // 2], device=model.device)
    at = torch.tensor([position], device=model.device)
    attention_hook.forward(model, token, at, observer, logits=False, state=state)
    return observer


def _check_attending(model: Any, seen: _Observer) -> list[int]:
    """The layers that attend."""
    attending = attending_layers(model.config)
    if sorted(seen.shapes) not in (attending, list(range(len(attending)))):
        raise cannot_run(
            model, f"{len(seen.shapes)} of its layers attend, and by its configuration {len(attending)} should."
        )
    return attending


def _common(model: Any, shapes: set[Shape]) -> Shape | None:
    """The shape that the layers of all ``shapes`` can be given; None where there is but one."""
    if len(shapes) == 1:
        return None
    largest = Shape(*(max(sizes) for sizes in zip(*shapes, strict=True)))
    if any(shape.q_heads != largest.q_heads or largest.kv_heads % shape.kv_heads for shape in shapes):
        listed = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        raise cannot_run(model, f"Its layers differ in (query heads, KV heads, key size, value size): {listed}.")
    return largest


# ---- rotation --------------------------------------------------------------------------------------


def _rotations(model: Any, base: _Observer) -> tuple[tuple[Rotation | None, ...], str | None]:
    near = {position: _observe(model, position) for position in NEAR}
    if any(_moved(base.values, seen.values) for seen in near.values()):
        return (), "the model adds its positions to the hidden states, so stored keys cannot be moved"
    candidates = list(_candidates(model, base.keys[0].shape[-1]))
    rotations = []
    for layer in sorted(base.keys):
        targets = {position - BASE: seen.keys[layer] for position, seen in near.items()}
        rotation = _identify(base.keys[layer], targets, candidates, tolerances.ROTATED_KEYS[model.dtype])
        if rotation is None and _differs(base.keys[layer], targets[NEAR[1] - BASE]):
            return (), f"the rotation of layer {layer}'s keys was not recognized"
        rotations.append(rotation)
    return tuple(rotations), _changes_with_length(model, base, rotations)


def _changes_with_length(model: Any, base: _Observer, rotations: list[Rotation | None]) -> str | None:
    """A reason to refuse a model whose keys rotate otherwise at twice the context (dynamic NTK, longrope), or None."""
    position = 2 * _context(model)
    far = _observe(model, position)
    _observe(model, BASE)  # a short forward puts the short text's frequencies back
    allowed = tolerances.ROTATED_KEYS[model.dtype] + tolerances.ANGLE_PER_POSITION * position
    for layer, rotation in enumerate(rotations):
        if rotation and _error(base.keys[layer], far.keys[layer], rotation, position - BASE) > allowed:
            return "its rotary frequencies change with the length of the text"
    return None


def _candidates(model: Any, d_k: int) -> Iterator[Rotation]:
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    distinct: list[Tensor] = []
    for name, buffer in buffers.items():
        if "original" not in name and not any(torch.equal(buffer, other) for other in distinct):
            distinct.append(buffer)
    for buffer in distinct:
        for inv_freq in (buffer.double(), -buffer.double()):  # nanochat turns backwards
            for interleaved, offset in itertools.product((False, True), {0, d_k - 2 * buffer.numel()}):
                if offset >= 0:
                    yield Rotation(inv_freq.clone(), interleaved, offset)


def _identify(
    keys: Tensor, targets: dict[int, Tensor], candidates: list[Rotation], tolerance: float
) -> Rotation | None:
    """The candidate that turns ``keys`` [H, d_k] into every target, by distance; None if none does."""
    errors = [max(_error(keys, target, c, delta) for delta, target in targets.items()) for c in candidates]
    best = min(range(len(errors)), key=errors.__getitem__, default=None)
    return None if best is None or errors[best] > tolerance else candidates[best]


def _error(keys: Tensor, target: Tensor, rotation: Rotation, delta: int) -> float:
    rotated = rotate(keys, rotation, *cos_sin(rotation, delta))
    return float((rotated - target).abs().max() / target.abs().max())


def _differs(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > tolerances.UNCHANGED * float(one.abs().max())


def _moved(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return any(_differs(one[layer], other[layer]) for layer in one)
