"""Fuse modules of a loaded model: replace their forwards by ones with fewer kernels, without reimplementing a model.

Modules are recognized by their structure and by what they compute for a few numbers, never by a model's name. They stay
in the model: only the ``forward`` of single instances is replaced, so parameters, hooks and other models in the process
are not affected.

  norms               RMSNorm as one kernel
  merged projections  q, k and v as one product; their weights become views of one tensor, so no memory is added
  rope                queries and keys rotated by one kernel
  fused layers        RMSNorm -> attention -> RMSNorm -> gated MLP, each with its residual: the projections after a norm
                      compute it, the projection before a residual adds it, gate and up compute SiLU(gate) * up
  attention           one function if it only projects, rotates and attends: the modules, views and lookups of its
                      own forward take a tenth of the bundled model's time per token on a CPU

The operations are plain torch and, for one decoded token on a GPU, Triton ``kernels``. torch.compile is no alternative:
it breaks the graph at the KV manager in every layer, took 27 s for an 8B model (H200, static cache), and does not merge
a norm into cuBLAS's products. Before the first answer the fused model is compared with the plain one, and restored if
they differ.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.kv.ops.cpu_ops import compiled_loops
from kvchat.models import attention_hook, probe
from kvchat.models.attention_hook import DenseManager
from kvchat.models.fuse.one_token import Norm, OneTokenLayer
from kvchat.models.probe import logits_error, logits_tolerance
from kvchat.models.quantize import rows
from kvchat.models.quantize.int4_rows import Int4Tiles
from kvchat.models.quantize.int8_rows import Int8Rows
from kvchat.models.quantize.rows import GATES, SILU, PackedRows, Weight, is_one_row, linear, merge, weight_of

BEFORE_MLP, AFTER_MLP = "pre_feedforward_layernorm", "post_feedforward_layernorm"
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
AROUND_MLP = {BEFORE_MLP, AFTER_MLP}
NORMS, MERGED, ROPE, LAYERS = "norms", "merged projections", "rope", "fused layers"
CHECKED_PROMPT, CHECKED_STEPS = 7, 3
ROTATION = "apply_rotary_pos_emb"  # transformers' name for it in every model that has one
CHILDREN, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, ("q_norm", "k_norm")
ATTENTION = CHILDREN | {*HEAD_NORMS}  # only the first three read the layer's input
TOKENS = 3  # for the check


@dataclass(frozen=True)
class FusionReport:
    """The kinds of modules that were fused, comma-separated, and a note for the user."""

    fused: str = ""
    note: str = ""


def fuse(
    model: Any, kernels: ModuleType | None, plain: Tensor | None = None, passed_before: bool = False
) -> FusionReport:
    """Fuse the recognized modules of ``model``, and check the result unless it ``passed_before``.

    ``model`` is loaded, on its device, with kvchat's attention. If the check fails with ``kernels`` (``kernels_for``),
    the model is fused without them; if it fails again, the model is restored. ``plain`` are the unfused model's
    ``sample_logits``, if already computed.
    """
    if plain is None and not passed_before:
        plain = sample_logits(model)
    failure = ""
    for chosen in dict.fromkeys((kernels, None)):
        swaps = Swaps()
        try:
            _fuse_modules(model, Operations(chosen), swaps)
            if plain is not None:
                _check(model, plain)
        except Exception as error:  # noqa: BLE001  # a kernel or a module may raise anything; the plain model works
            swaps.undo()
            failure = failure or f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
        else:
            return FusionReport(", ".join(swaps.kinds), _note(model, swaps, failure))
    return FusionReport(note=f"The model runs without the fast path, which failed its check ({failure}).")


def kernels_for(device: torch.device) -> ModuleType | None:
    """Return the Triton kernels; None without a GPU or without Triton."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from kvchat.models.fuse import kernels

    return kernels


class Swaps:
    """The replaced forwards; ``kinds`` are the kinds of fused modules, in order."""

    def __init__(self) -> None:
        self.kinds: dict[str, None] = {}
        self._before: dict[nn.Module, Callable[..., Any] | None] = {}

    def replace(self, module: nn.Module, forward: Callable[..., Any], kind: str = "") -> None:
        self._before.setdefault(module, module.__dict__.get("forward"))
        module.forward = forward
        if kind:
            self.kinds[kind] = None

    def undo(self) -> None:
        """Restore every module's forward. Merged weights stay views of the same values."""
        for module, forward in self._before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward
        self._before.clear()


def _note(model: Any, swaps: Swaps, failure: str) -> str:
    if failure:
        return f"The fast path runs without its kernels ({failure})."
    if model.device.type == "cuda" and not swaps.kinds:
        return "The fast path recognizes no module of this model; it runs transformers' own code."
    return ""


# ---- fusing
def _fuse_modules(model: Any, operations: Operations, swaps: Swaps) -> None:
    norms = {module: norm for module in model.modules() if (norm := rms_norm(module))}
    merged = {
        module: MergedLinear(projections(module), operations) for module in model.modules() if is_attention(module)
    }
    layers = [module for module in model.modules() if is_layer(module, norms, merged)]
    for module, norm in norms.items():
        swaps.replace(module, partial(operations.normed, norm=norm), NORMS)
    for module, product in merged.items():
        for index, projection in enumerate(projections(module)):
            swaps.replace(projection, partial(product.part, index=index), MERGED)
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)  # transformers 5.24 wraps it to rename an argument
        if rotates_halves(forward):
            swaps.replace(module, _rebound(forward, operations).__get__(module), ROPE)
    for layer in layers:
        attention = fused_attention(layer.self_attn, merged[layer.self_attn], operations, model.dtype, norms)
        _fuse_layer(layer, norms, merged[layer.self_attn], attention, operations, swaps)
    head = model.get_output_embeddings()
    if is_plain(head) and LAYERS in swaps.kinds:
        swaps.replace(head, partial(operations.project, weight=weight_of(head), bias=head.bias), LAYERS)
    for module in filter(is_plain, model.modules() if model.device.type == "cuda" else ()):
        if isinstance(weight_of(module), PackedRows):
            swaps.replace(module, partial(operations.project, weight=weight_of(module), bias=module.bias))
    if model.device.type == "cpu" and (rows.in_blocks() or rows.widens(model.dtype, model.device)):
        for module in filter(is_plain, model.modules()):
            swaps.replace(module, partial(linear, weight=weight_of(module), bias=module.bias))


def _fuse_layer(
    layer: Any,
    norms: dict[nn.Module, Norm],
    merged: MergedLinear,
    fused: FusedAttention | None,
    operations: Operations,
    swaps: Swaps,
) -> None:
    attention, mlp, output = layer.self_attn, layer.mlp, Output(layer.self_attn.o_proj, operations)
    first, second = norms[layer.input_layernorm], norms[layer.post_attention_layernorm]
    added: Sequence[Norm | None] = (None, None)  # norms of what attention and MLP add
    if hasattr(layer, BEFORE_MLP):
        added, second = (second, norms[layer.post_feedforward_layernorm]), norms[layer.pre_feedforward_layernorm]
    gate_up, gate = merge_weights([mlp.gate_proj, mlp.up_proj]), gate_of(mlp)
    down = mlp.down_proj
    one_token = _one_token_layer(fused, first, second, added, gate_up, gate, down) if fused else None

    def add(state: Tensor, made: Tensor, norm: Norm | None) -> Tensor:
        return made if norm is None else state + operations.normed(made, norm)

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if fused and fused.suits(hidden_states, kwargs):
            is_float32_row = one_token and is_one_row(hidden_states) and hidden_states.dtype == torch.float32
            turns = operations.turns(*kwargs["position_embeddings"]) if is_float32_row else None
            if one_token and turns:
                return one_token(hidden_states, *turns)
            attended = fused(hidden_states, kwargs["position_embeddings"], first, None if added[0] else hidden_states)
        else:
            merged.norm, output.residual = first, None if added[0] else hidden_states
            attended, _ = attention(hidden_states=hidden_states, **kwargs)
        attended = add(hidden_states, attended, added[0])
        active = operations.gated(attended, gate_up, second, gate)
        projected = operations.project(active, weight_of(down), down.bias, None, None if added[1] else attended)
        return add(attended, projected, added[1])

    swaps.replace(attention.o_proj, output, LAYERS)
    swaps.replace(layer, forward, LAYERS)


def _one_token_layer(
    fused: FusedAttention,
    first: Norm,
    second: Norm,
    added: Sequence[Norm | None],
    gate_up: Weight,
    gate: int,
    down: nn.Linear,
) -> OneTokenLayer | None:
    """Return the layer as one loop before attention and one after; None unless all its matrices are packed alike."""
    output = fused.module.o_proj
    matrices = fused.merged.weight, weight_of(output), gate_up, weight_of(down)
    found = [matrix.arrays for matrix in matrices if isinstance(matrix, PackedRows)]
    arrays = [each for each in found if each is not None]
    if len(arrays) < len(matrices) or len(set(map(len, arrays))) > 1:
        return None
    qkv, out, up, last = arrays
    before, attention = (qkv, fused.merged.bias, first), (out, output.bias, added[0])
    mlp = (up, second, gate), (last, down.bias, added[1])
    return OneTokenLayer(fused.module, fused.heads, before, fused.head_norms, attention, *mlp)


def _rebound(forward: FunctionType, operations: Operations) -> FunctionType:
    """Return ``forward`` with the global name of the rotation bound to ours, without changing its module's globals."""
    names = forward.__globals__ | {ROTATION: partial(_rotate, operations, forward.__globals__[ROTATION])}
    rebound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebound.__kwdefaults__ = forward.__kwdefaults__
    return rebound


def _rotate(
    operations: Operations, own: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any
) -> Any:
    known = not args and cos.shape == (1, query.shape[2], query.shape[3]) and query.stride(3) == key.stride(3) == 1
    return operations.rotate(query, key, cos, sin) if known else own(query, key, cos, sin, *args)


# ---- the check
def sample_logits(model: Any) -> Tensor:
    """Return the logits ``[tokens, vocab]`` of a short prompt and of a few decoded tokens, in float32."""
    ids = torch.arange(CHECKED_PROMPT + CHECKED_STEPS, device=model.device)
    return probe.stepwise(model, torch.split(ids, [CHECKED_PROMPT, *[1] * CHECKED_STEPS]), DenseManager(), whole=True)


def _check(model: Any, plain: Tensor) -> None:
    """Raise ArithmeticError if the logits differ from those of the ``plain`` model."""
    error, allowed = logits_error(model, sample_logits(model), plain, share=0.5), logits_tolerance(model)
    if not error <= allowed:
        raise ArithmeticError(f"its results differ by {error:.2g} (relative), {allowed:.2g} is allowed")


def rms_norm(module: Any) -> Norm | None:
    """Return the RMSNorm ``x / rms(x) * weight``, or Gemma's with 1 + weight, that ``module`` computes; else None."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        not isinstance(weight, Tensor)
        or weight.dim() != 1
        or not isinstance(eps, float)
        or len([*module.parameters(recurse=False)]) != 1
    ):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gated norm also takes a gate
        return None
    x = numbers(weight) + 1
    measured = _outcome(module, x)
    if measured is None:
        return None
    scaled = x.float() * torch.rsqrt(x.float().square().mean() + eps)
    allowed = probe.NORM_ROUNDINGS * torch.finfo(weight.dtype).eps
    for factors in (weight, 1 + weight.detach().float()):
        if probe.relative_error(measured.float(), factors.detach().float() * scaled) < allowed:
            return Norm(factors, eps)
    return None


def is_attention(module: Any) -> bool:
    """Return True if ``module`` projects its input to queries, keys and values by Linears that can be merged."""
    return _has(module, "q_proj", "k_proj", "v_proj") and _mergeable(projections(module))


def projections(module: Any) -> list[Any]:
    """Return the Linears of queries, keys and values of an attention module."""
    return [module.q_proj, module.k_proj, module.v_proj]


def is_layer(module: Any, norms: Collection[nn.Module], attentions: Collection[nn.Module]) -> bool:
    """Return True if ``module`` is norm -> attention -> + -> norm -> gated MLP -> +, with all parts recognized.

    Gemma's layers also have a norm before each sum.
    """
    children = _children(module)
    if children not in (LAYER, LAYER | AROUND_MLP) or module.self_attn not in attentions:
        return False
    if any(getattr(module, name) not in norms for name in children - {"self_attn", "mlp"}):
        return False
    return (
        _children(module.self_attn) <= ATTENTION  # only the merged projections read the layer's input
        and is_plain(module.self_attn.o_proj)
        and gate_of(module.mlp) > 0
        and _adds_like_a_layer(module)
    )


def _adds_like_a_layer(layer: nn.Module) -> bool:
    """Return True if a layer adds its parts in the known order; any other order would give another number."""
    parts: dict[str, Callable[..., Any]] = {
        "input_layernorm": lambda x: x + 1,
        "self_attn": lambda hidden_states, **kwargs: (hidden_states * 3, None),
        "post_attention_layernorm": lambda x: x + 5,
        "mlp": lambda x: x * 7,
    }
    if not hasattr(layer, BEFORE_MLP):
        return _results_in(_with_stubs(layer, parts), 1.0, 7 * (1 + 3 * 2 + 5) + 1 + 3 * 2)
    parts |= {BEFORE_MLP: lambda x: x + 2, AFTER_MLP: lambda x: x * 11}
    return _results_in(_with_stubs(layer, parts), 1.0, 11 * 7 * (1 + 3 * 2 + 5 + 2) + 1 + 3 * 2 + 5)


def gate_of(mlp: Any) -> int:
    """Return the ``gate``'s number in ``GATES``, from 1, if the MLP is ``down(gate(gate_proj(x)) * up(x))``; else 0."""
    if not _has(mlp, "gate_proj", "up_proj", "down_proj") or not _mergeable([mlp.gate_proj, mlp.up_proj]):
        return 0
    if mlp.gate_proj.bias is not None or not is_plain(mlp.down_proj):
        return 0
    stub = _with_stubs(mlp, {"gate_proj": lambda x: x * 2, "up_proj": lambda x: x + 3, "down_proj": lambda x: x * 5})
    for number, gate in enumerate(GATES, 1):
        if all(_results_in(stub, x, 5 * float(gate(torch.tensor(2 * x))) * (x + 3)) for x in (1.0, -1.5)):
            return number
    return 0


def rotates_halves(forward: Any) -> bool:
    """Return True if ``forward`` calls a rotation that pairs the first half of a head with its second."""
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return False
    query, key, angle = (numbers(torch.empty(1, heads, 3, 8)) for heads in (2, 1, 1))
    cos, sin = angle[:, 0].cos(), angle[:, 0].sin()
    try:
        rotated = forward.__globals__[ROTATION](query, key, cos, sin)
        expected = Operations(None).rotate(query, key, cos, sin)
        pairs = zip(rotated, expected, strict=True)
        return all(torch.allclose(one, other, atol=probe.ROTATION) for one, other in pairs)
    except Exception:  # noqa: BLE001  # it takes other arguments
        return False


def _mergeable(linears: list[Any]) -> bool:
    if not all(is_plain(linear) for linear in linears):
        return False
    if not all(weight.mergeable for weight in map(weight_of, linears) if isinstance(weight, PackedRows)):
        return False
    return len({_likeness(linear) for linear in linears}) == 1


def _likeness(linear: Any) -> tuple[Any, ...]:
    weight = weight_of(linear)
    data = weight.data
    return linear.in_features, linear.bias is None, type(weight), data.dtype, data.device, data.is_contiguous()


def is_plain(module: Any) -> bool:
    """Return True if ``module`` is a Linear with its own forward and unquantized weights, or with ``PackedRows``."""
    if type(module) is not nn.Linear:
        return False
    weight, forward = weight_of(module), module.__dict__.get("forward")
    if isinstance(weight, PackedRows):
        return bool(forward == weight.forward)
    # Quantizers' tensors claim to be floating point; they can be sliced, but often not concatenated.
    return type(weight) is nn.Parameter and weight.is_floating_point() and forward is None


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _has(module: Any, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _with_stubs(module: nn.Module, functions: dict[str, Callable[..., Any]]) -> nn.Module:
    """Return a copy of ``module`` with the same code and settings, whose children compute ``functions`` by name."""
    stub = copy.copy(module)
    stub._modules = module._modules | {name: _Stub(function) for name, function in functions.items()}
    return stub


class _Stub(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _results_in(module: nn.Module, x: float, expected: float) -> bool:
    measured = _outcome(module, torch.full((1, 1, 1), x))
    if measured is None or measured.shape != (1, 1, 1):
        return False
    return abs(float(measured) - expected) < probe.SMALL_NUMBERS


def _outcome(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return what the forward of the module's class computes for ``x``; None if it raises or returns no tensor."""
    try:
        with torch.inference_mode():
            result = type(module).forward(module, x)
    except Exception:  # noqa: BLE001  # it takes other arguments
        return None
    return result if isinstance(result, Tensor) else None


def numbers(like: Tensor) -> Tensor:
    """Return random numbers of a tensor's shape, dtype and device, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


class FusedAttention:
    """The attention ``module`` as one function, with its projections ``merged``.

    ``head_norms`` are the norms of queries and of keys, before the rotation; empty if the module has none.
    """

    def __init__(
        self, module: Any, merged: MergedLinear, operations: Operations, head_norms: Sequence[Norm] = ()
    ) -> None:
        self.module = module
        self.merged = merged
        self.head_norms = head_norms
        self._operations = operations
        self._size: int = module.head_dim
        self.heads = [size // self._size for size in merged.sizes]  # of queries, keys and values

    def suits(self, hidden: Tensor, arguments: dict[str, Any]) -> bool:
        """Return True if the fused forward can compute this call: no mask, no cache, angles of its head size."""
        if any(arguments.get(name) is not None for name in ("attention_mask", "past_key_values", "cache")):
            return False  # the cache is called "cache" since transformers 5.24
        angles = arguments.get("position_embeddings")
        return angles is not None and angles[0].shape == (1, hidden.shape[1], self._size)

    def __call__(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Compute the module for ``hidden [1, n, K]``, first normalized by ``norm``, and add ``residual [1, n, K]``.

        ``angles`` are the cosines and sines ``[1, n, d]`` of the positions.
        """
        output, tokens, (queries, keys, _) = self.module.o_proj, hidden.shape[1], self.heads
        weight, bias = self.merged.weight, self.merged.bias
        if query_only := attention_hook.wants_query_only():
            weight, bias, keys = weight_of(self.module.q_proj), self.module.q_proj.bias, 0
        turns = None if self.head_norms else ((queries + keys) * self._size, *angles)
        product, is_rotated = self._operations.project_heads(hidden, weight, bias, norm, turns)
        heads = product.view(1, tokens, -1, self._size).transpose(1, 2)
        query, key = heads[:, :queries], heads[:, queries : queries + keys]
        if not is_rotated:
            both = heads[:, : queries + keys]
            query, key = self._operations.rotate_together(both, queries, *angles, self.head_norms)
        key, value = (query, query) if query_only else (key, heads[:, queries + keys :])
        attended, _ = attention_hook.attention(self.module, query, key, value, None)
        return self._operations.project(attended.flatten(2), weight_of(output), output.bias, None, residual)


def fused_attention(
    module: Any, merged: MergedLinear, operations: Operations, dtype: torch.dtype, norms: Mapping[nn.Module, Norm]
) -> FusedAttention | None:
    """Return a ``FusedAttention``, checked in ``dtype``; None if the module computes something else."""
    own = [module.get_submodule(name) for name in HEAD_NORMS if name in _children(module)]
    head_norms = [norms[norm] for norm in own if norm in norms]
    known = _children(module) == (ATTENTION if own else CHILDREN) and len(head_norms) == len(own)
    if not known or not isinstance(getattr(module, "head_dim", None), int):
        return None
    if any(norm.weight.shape != (module.head_dim,) for norm in head_norms):  # normalizes all heads together
        return None
    fused = FusedAttention(module, merged, operations, head_norms)
    return fused if _agrees(module, fused, dtype) else None


def _agrees(module: Any, fused: FusedAttention, dtype: torch.dtype) -> bool:
    sizes = module.q_proj.in_features, module.head_dim
    where: dict[str, Any] = {"dtype": dtype, "device": module.o_proj.weight.device}
    hidden, angle = (numbers(torch.empty(1, TOKENS, size, **where)) for size in sizes)
    angles = angle.cos(), angle.sin()
    given = {"hidden_states": hidden, "position_embeddings": angles, "attention_mask": None}
    try:
        with torch.inference_mode():
            with attention_hook.bound(DenseManager()):
                expected = type(module).forward(module, **given)[0]
            with attention_hook.bound(DenseManager()):
                measured = fused(hidden, angles)
    except Exception:  # noqa: BLE001  # it takes other arguments
        return False
    if measured.shape != expected.shape:
        return False
    error = probe.relative_error(measured.float(), expected.float())
    return error < probe.products_tolerance(dtype, isinstance(weight_of(module.o_proj), PackedRows))


class Operations:
    """The operations of fused modules: plain torch, and for one token ``kernels`` if there are any."""

    def __init__(self, kernels: ModuleType | None) -> None:
        self._kernels = kernels
        # Caches for the last angles, which are the same in all layers of a forward.
        self._sin: Tensor | None = None
        self._signed_sin: Tensor | None = None
        self._last_angles: tuple[Tensor | None, Tensor | None] = (None, None)
        self._turns: tuple[Any, Any] | None = None

    def _kernels_for(self, x: Tensor, weight: Weight) -> ModuleType | None:
        """Return the kernels if they can multiply ``x`` by ``weight``, else None."""
        return self._kernels if self._kernels and is_one_row(x) and not isinstance(weight, Int4Tiles) else None

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        if x.device.type == "cpu" and is_one_row(x):
            # torch's own takes 20 to 60 us for one token. On a CPU, reading the sum costs nothing.
            row = x.float().view(-1)
            scale: float = (float(torch.dot(row, row)) / row.shape[0] + norm.eps) ** -0.5
            return (row * scale).mul_(norm.weight).view(x.shape).to(x.dtype)
        return F.rms_norm(x.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)

    def project(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Normalize ``x [..., K]`` by ``norm``, multiply it by ``weight [N, K]``, add ``bias`` and ``residual``."""
        if kernels := self._kernels_for(x, weight):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            result: Tensor = kernels.project(x, weight.data, bias, scale, eps, residual, _scales(weight))
            return result
        if isinstance(weight, PackedRows) and is_one_row(x):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            if (found := weight.one_token(x, bias, scale, eps, residual)) is not None:
                return found
        projected = linear(x if norm is None else self.normed(x, norm), weight, bias)
        return projected if residual is None else projected.add_(residual)

    def project_heads(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        turns: tuple[int, Tensor, Tensor] | None,
    ) -> tuple[Tensor, bool]:
        """Compute ``project``, and return True if the heads were rotated too; ``turns`` as in ``kernels.project``."""
        kernels = self._kernels_for(x, weight)
        if turns is None or kernels is None:
            return self.project(x, weight, bias, norm), False
        scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return kernels.project(x, weight.data, bias, scale, eps, None, _scales(weight), turns), True

    def gated(self, x: Tensor, weight: Weight, norm: Norm, kind: int = SILU) -> Tensor:
        """Compute ``gate(x) * up(x)`` of ``x [..., K]``, first normalized by ``norm``.

        ``weight [2 N, K]`` is gate's followed by up's; ``kind`` is the gate's number in ``GATES``.
        """
        if kind == SILU and (kernels := self._kernels_for(x, weight)):
            result: Tensor = kernels.gated(x, weight.data, norm.weight, norm.eps, _scales(weight))
            return result
        if isinstance(weight, PackedRows) and is_one_row(x):
            found = weight.one_token(x, None, norm.weight, norm.eps, gate=kind)
            if found is not None:
                return found
        gate, up = linear(self.normed(x, norm), weight).chunk(2, -1)
        return GATES[kind - 1](gate).mul_(up)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate all of ``query [1, H_q, n, d]`` and ``key [1, H, n, d]`` by ``cos`` and ``sin [1, n, d]``."""
        if self._kernels:
            rotated: tuple[Tensor, Tensor] = self._kernels.rotate(query, key, cos, sin)
            return rotated
        return self._rotated(query, cos, sin), self._rotated(key, cos, sin)

    def rotate_together(
        self, heads: Tensor, queries: int, cos: Tensor, sin: Tensor, norms: Sequence[Norm] = ()
    ) -> tuple[Tensor, Tensor]:
        """Rotate ``heads [1, H_q + H, n, d]``, the first ``queries`` of which are query heads; may write into them.

        With ``norms``, of queries and of keys, each head is normalized first.
        """
        if self._kernels:
            query, key = heads[:, :queries], heads[:, queries:]
            rotated: tuple[Tensor, Tensor] = self._kernels.rotate(query, key, cos, sin, norms)
            return rotated
        if norms:
            parts = zip((heads[:, :queries], heads[:, queries:]), norms, strict=True)
            heads = torch.cat([self.normed(part, norm) for part, norm in parts], 1)
        is_one_token = heads.shape[2] == 1 and _are_float32_on_cpu(heads)
        if is_one_token and (loops := compiled_loops()) and (turns := self.turns(cos, sin)):
            loops.rotate(heads[0, :, 0].numpy(), *turns)
            return heads[:, :queries], heads[:, queries:]
        both = self._rotated(heads, cos, sin)
        return both[:, :queries], both[:, queries:]

    def turns(self, cos: Tensor, sin: Tensor) -> tuple[Any, Any] | None:
        """Return ``cos`` and ``sin [1, 1, d]`` as numpy arrays ``[d]``; None unless both are float32 on the CPU."""
        if not (cos is self._last_angles[0] and sin is self._last_angles[1]):
            self._last_angles = cos, sin
            self._turns = (cos.view(-1).numpy(), sin.view(-1).numpy()) if _are_float32_on_cpu(cos, sin) else None
        return self._turns

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = sin.shape[-1] // 2
        if sin is not self._sin:
            self._sin, self._signed_sin = sin, torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]
        assert self._signed_sin is not None
        rotated = torch.addcmul(heads * cos[:, None], heads.roll(half, -1), self._signed_sin)
        return rotated.to(heads.dtype)  # some models' angles are always float32


def _scales(weight: Weight) -> Tensor | None:
    """Return the scales of 8-bit rows, else None."""
    return weight.scales if isinstance(weight, Int8Rows) else None


def _are_float32_on_cpu(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)


class MergedLinear:
    """Several Linears with the same input as one product; a ``norm`` set before the call normalizes the input first.

    Calling the first part computes all; the others return theirs when called with the same input.
    """

    def __init__(self, linears: list[nn.Linear], operations: Operations) -> None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.weight = merge_weights(linears)
        self.bias = merge(biases) if biases else None
        self.norm: Norm | None = None
        self.sizes = [linear.out_features for linear in linears]
        self._operations = operations
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return the output ``[..., N]`` of Linear ``index`` for ``x [..., K]``."""
        if x is not self._input or self._parts[index] is None:
            norm, self.norm = self.norm, None
            product = self._operations.project(x, self.weight, self.bias, norm)
            self._input, self._parts = x, list(torch.split(product, self.sizes, -1))
        part, self._parts[index] = self._parts[index], None
        if not any(other is not None for other in self._parts):
            self._input = None
        assert part is not None
        return part


class Output:
    """A Linear that adds the ``residual``, which is set before each call."""

    def __init__(self, linear: nn.Linear, operations: Operations) -> None:
        self._linear = linear
        self._operations = operations
        self.residual: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        return self._operations.project(x, weight_of(self._linear), self._linear.bias, None, residual)


def merge_weights(linears: Sequence[nn.Linear]) -> Weight:
    """Merge the weights of Linears with the same input into one matrix; their own become views of it."""
    rows = weight_of(linears[0])
    return rows.merged(linears) if isinstance(rows, PackedRows) else merge([linear.weight for linear in linears])
