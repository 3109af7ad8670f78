"""Check a loaded model: the probe observes shapes and rules, the self-test compares the model with transformers.

The probe: with a single key, the softmax is 1 and attention returns that key's value at any position. So with rotary
positions, a lone token has the same hidden states at every position, and a forward at position p yields every layer's
key of that token at p. Comparing the keys at a few positions with the rotations that the model's ``inv_freq`` buffers
allow identifies each layer's rotation, without relying on a model's name or configuration.

The self-test: neither flags nor names say whether the hook computes a model's attention correctly (bloom, llama4 and
gemma3n give fluent but wrong answers), so every model is tested. The reference is eager and not sdpa, because sdpa in
transformers 5.17 ignores gemma2's soft cap without a warning.

Each tolerance is between the errors measured with correct and with wrong models. The checks of kv's kernels have their
own tolerances (``kvchat.kv.ops.verify``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvchat.errors import ModelError
from kvchat.kv.attention import AttentionSpec
from kvchat.kv.rope import Rotation, cos_sin, rotate
from kvchat.models import attention_hook
from kvchat.models.attention_hook import AttentionBackend, DenseManager, Shape
from kvchat.models.quantize.quantization import is_packed
from kvchat.models.recurrent import RecurrentState, attending_layers
from kvchat.models.support import cannot_run, keeping_state

BASE = 11
NEAR = (3, 34)
PREFILL = (19, 14)
DECODE = 5
SECOND_TURN = 10
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names in configurations
EXPERTS_AGREE = 0.25  # share of tokens that must agree in a mixture of experts; wrong attention leaves fewer
# Logits of the self-test and of fused modules, relative L2 error. Correct models measure below 1e-5 in float32 and
# about 0.02 in bfloat16; wrong ones (bloom, llama4, gemma3n with an attention that ignores their rules) 0.2 to 1.1.
LOGITS = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.15}
# Rotated keys of the probe, relative to the largest element. Correct rotations measure below 1e-5 in float32 and 0.02
# in bfloat16, wrong ones above 0.3.
ROTATED_KEYS = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
# Rounding of the model's float32 angles, in radians per position.
ANGLE_PER_POSITION = 2e-7
# Difference of a token's keys or values at two positions, relative to the largest element; less is rounding.
UNCHANGED = 1e-3
# Output of a module compared with an RMSNorm, relative L2 error in units of the dtype's epsilon: the module rounds to
# that dtype a few times, and the expected result is computed in float32.
NORM_ROUNDINGS = 8
# Sums and products of small integers: a wrong order or factor changes the result by at least 1.
SMALL_NUMBERS = 1e-4
# Elements of rotated random heads in float32, of size about 1: two products and one sum.
ROTATION = 1e-5


@dataclass(frozen=True, eq=False)
class Probe:
    """A model's observed attention.

    Attributes:
        d_k, d_v: sizes of one head's key and value.
        specs: rule of each attending layer.
        rotations: one per attending layer; None for a layer without positions, the same object for equal rotations.
            Empty if keys cannot be moved to other positions; ``refusal`` says why.
        unlike: True if layers have different shapes; all are then padded to the largest.
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
        ModelError: the layers cannot be padded to one shape, or the configuration names other attending layers.
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
    """Return the shape of every layer's heads from one token's forward, which fills ``state``; also on the meta device.

    Raises:
        ModelError: the layers cannot be padded to one shape, or keep state that cannot be copied.
    """
    with keeping_state(model, state), UnknownValues():
        observer = _observe(model, 0, state)
    shapes = set(observer.shapes.values())
    return _common(model, shapes) or shapes.pop()


def pin_frequencies(model: Any) -> bool:
    """Fix rotary frequencies that depend on the text's length at those of the full context; return False if none do.

    longrope picks one of two sets by the positions of each forward, so chunks of one prompt could be rotated by both.
    """
    rotary = [module for module in model.modules() if _follows_length(module)]
    if rotary:
        _observe(model, _context(model) - 1)
    for module in rotary:
        kinds = module.rope_type
        module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    return bool(rotary)


class _Observer:
    """An ``AttentionBackend`` for one token that records its arguments and attends to the token itself."""

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
    attending = attending_layers(model.config)
    if sorted(seen.shapes) not in (attending, list(range(len(attending)))):
        raise cannot_run(
            model, f"{len(seen.shapes)} of its layers attend; by its configuration {len(attending)} should."
        )
    return attending


def _common(model: Any, shapes: set[Shape]) -> Shape | None:
    """Return the shape to pad layers of these ``shapes`` to; None if all have the same."""
    if len(shapes) == 1:
        return None
    largest = Shape(*(max(sizes) for sizes in zip(*shapes, strict=True)))
    if any(shape.q_heads != largest.q_heads or largest.kv_heads % shape.kv_heads for shape in shapes):
        listed = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        raise cannot_run(model, f"Its layers differ in (query heads, KV heads, key size, value size): {listed}.")
    return largest


# ---- rotation
def _rotations(model: Any, base: _Observer) -> tuple[tuple[Rotation | None, ...], str | None]:
    near = {position: _observe(model, position) for position in NEAR}
    if any(_differs(base.values[layer], seen.values[layer]) for seen in near.values() for layer in base.values):
        return (), "the model adds its positions to the hidden states, so stored keys cannot be moved"
    candidates = list(_candidates(model, base.keys[0].shape[-1]))
    rotations = []
    for layer in sorted(base.keys):
        targets = {position - BASE: seen.keys[layer] for position, seen in near.items()}
        rotation = _identify(base.keys[layer], targets, candidates, ROTATED_KEYS[model.dtype])
        if rotation is None and _differs(base.keys[layer], targets[NEAR[1] - BASE]):
            return (), f"the rotation of layer {layer}'s keys was not recognized"
        rotations.append(rotation)
    return tuple(rotations), _changes_with_length(model, base, rotations)


def _changes_with_length(model: Any, base: _Observer, rotations: list[Rotation | None]) -> str | None:
    """Return why keys cannot be moved if they rotate differently at twice the context (dynamic NTK, longrope)."""
    position = 2 * _context(model)
    far = _observe(model, position)
    allowed = ROTATED_KEYS[model.dtype] + ANGLE_PER_POSITION * position
    for layer, rotation in enumerate(rotations):
        if rotation and _error(base.keys[layer], far.keys[layer], rotation, position - BASE) > allowed:
            _observe(model, BASE)  # a short forward restores the frequencies of short texts
            return "its rotary frequencies change with the length of the text"
    return None


def _candidates(model: Any, d_k: int) -> Iterator[Rotation]:
    named = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    buffers = {name: buffer.to(model.device) for name, buffer in named}
    distinct: list[Tensor] = []
    for name, buffer in buffers.items():
        if "original" not in name and not any(torch.equal(buffer, other) for other in distinct):
            distinct.append(buffer)
    for buffer in distinct:
        for inv_freq in (buffer.double(), -buffer.double()):  # nanochat rotates backwards
            for interleaved, offset in itertools.product((False, True), {0, d_k - 2 * buffer.numel()}):
                if offset >= 0:
                    yield Rotation(inv_freq.clone(), interleaved, offset)


def _identify(
    keys: Tensor, targets: dict[int, Tensor], candidates: list[Rotation], tolerance: float
) -> Rotation | None:
    """Return the candidate that rotates ``keys`` [H, d_k] by each distance into its target; None if none does."""
    errors = [max(_error(keys, target, c, delta) for delta, target in targets.items()) for c in candidates]
    best = min(range(len(errors)), key=errors.__getitem__, default=None)
    return None if best is None or errors[best] > tolerance else candidates[best]


def _error(keys: Tensor, target: Tensor, rotation: Rotation, delta: int) -> float:
    rotated = rotate(keys, rotation, *cos_sin(rotation, delta))
    return float((rotated - target).abs().max() / target.abs().max())


def _differs(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > UNCHANGED * float(one.abs().max())


class UnknownValues(TorchFunctionMode):
    """In this block, values on the meta device are zeros, and unknown split sizes put everything in the first part."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, unless its result depends on values on the meta device."""
        if func is Tensor.nonzero and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        if func is Tensor.tolist and args[0].is_meta:
            return _UnknownSizes([0] * len(args[0]))
        if func is Tensor.split and isinstance(args[1], _UnknownSizes):
            return (args[0], *[args[0][:0]] * (len(args[1]) - 1))
        return func(*args, **kwargs or {})


class _UnknownSizes(list[int]):
    """Zeros instead of the sizes of parts."""


def reads_chunks(model: Any) -> bool:
    """Return True if a forward of several tokens continues a recurrent state; jamba's starts from an empty one.

    Raises:
        ModelError: transformers refuses, or keeps state that cannot be copied.
    """
    chunks, state = _chunks(model), RecurrentState(model.config)
    if not state.exists:
        return True
    with keeping_state(model, state):
        last = stepwise(model, chunks[:2], DenseManager(), state)[-1]
    expected = _reference(model, torch.cat(chunks[:2]))[-1]
    return relative_error(last, expected) <= logits_tolerance(model)


def selftest(model: Any, make_backend: Callable[[], AttentionBackend] = DenseManager, chunked: bool = True) -> float:
    """Compare chunked prefill, decode and a second turn through the hook with one eager forward over all tokens.

    Without ``chunked``, all tokens after the first chunk are processed one by one.

    Returns the relative L2 error of the logits that a chat would sample from.

    Raises:
        ModelError: the error is too large for the model's dtype, so its answers would be wrong.
    """
    chunks = _chunks(model, chunked)
    ends = torch.cumsum(torch.tensor([len(chunk) for chunk in chunks]), 0) - 1
    made = stepwise(model, chunks, make_backend(), RecurrentState(model.config))
    measured = logits_error(model, made, _reference(model, torch.cat(chunks))[ends], share=EXPERTS_AGREE)
    allowed = logits_tolerance(model)
    if not measured <= allowed:
        raise ModelError(
            f"kvchat does not run {type(model).__name__} correctly.",
            f"In the self-test its logits differ from transformers' own by {measured:.2g} (relative), "
            f"and {allowed:.2g} is allowed in {str(model.dtype).removeprefix('torch.')}.",
            "Choose another model.",
        )
    return measured


def _chunks(model: Any, chunked: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [*PREFILL, *[1] * DECODE, SECOND_TURN]
    if not chunked:
        lengths = [PREFILL[0], *[1] * sum(lengths[1:])]
    vocab = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocab, (sum(lengths),), generator=generator).to(model.device)
    return list(torch.split(ids, lengths))


def stepwise(
    model: Any,
    chunks: Sequence[Tensor],
    backend: AttentionBackend,
    state: RecurrentState | None = None,
    whole: bool = False,
) -> Tensor:
    """Return logits ``[tokens, vocab]`` of the last token of each chunk, or of all; ``state`` as in ``forward``."""
    logits, start = [], 0
    for chunk in chunks:
        positions, last = torch.arange(start, start + len(chunk), device=chunk.device), len(chunk) if whole else 1
        made = attention_hook.forward(model, chunk, positions, backend, logits=True, state=state, last=last)
        assert made is not None
        logits.append(made.view(last, -1))
        start += len(chunk)
    return torch.cat(logits)


def _reference(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():  # the model counts positions itself; a few begin at 2
            logits: Tensor = model(ids[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(attention_hook.NAME)
    return logits.float()


def logits_tolerance(model: Any) -> float:
    """Return the relative error of the logits of ``model`` that rounding explains."""
    return products_tolerance(model.dtype, is_packed(model))


def products_tolerance(dtype: torch.dtype, packed: bool) -> float:
    """Return the relative error that rounding to ``dtype`` explains; packed weights multiply in half precision."""
    return LOGITS[torch.bfloat16 if packed else dtype]


def logits_error(model: Any, measured: Tensor, reference: Tensor, share: float) -> float:
    """Return the relative error of logits ``[tokens, vocab]``; for a mixture of experts the ``share`` quantile.

    The quantile is over tokens. Rounding sends some to other experts: in a mixture with random weights in bfloat16,
    five tokens out of eight had errors of 0.16 to 0.95, the others 0.1.
    """
    if not has_experts(model):
        return relative_error(measured, reference)
    pairs = zip(measured, reference, strict=True)
    return float(torch.tensor([relative_error(*pair) for pair in pairs]).quantile(share))


def has_experts(model: Any) -> bool:
    """Return True for a mixture of experts, where each token passes through some of them."""
    config = model.config.get_text_config(decoder=True)
    sections = (config, *(getattr(config, name, None) for name in config.sub_configs))  # DBRX has a section for its MLP
    return any(getattr(section, name, None) for section in sections for name in EXPERTS)


def relative_error(measured: Tensor, reference: Tensor) -> float:
    """Return ||measured - reference|| / ||reference||; NaN anywhere gives NaN."""
    return float((measured - reference).norm() / reference.norm())
