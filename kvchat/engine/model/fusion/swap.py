"""Fuses modules of a loaded model: their forwards are swapped for ones of fewer kernels. No model is reimplemented.

Modules are recognized by what they compute on a few numbers (``recognize``) and stay in the model: only the ``forward``
of single instances is replaced, so parameters, hooks and other models of the process are not affected.

  norms               RMSNorm as one kernel
  merged projections  q, k and v as one product; their weights become views of one tensor, so no memory is added
  rope                queries and keys rotated by one kernel
  fused layers        RMSNorm -> attention -> RMSNorm -> gated MLP, each with its residual: a norm is computed in the
                      projections after it, a residual in the one before it, SiLU(gate) * up in those two; attention
                      that only projects and rotates is one function (``fused_attention``)

Before anything is answered the fused model is compared with the plain one, and restored if they differ.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvchat.engine.model import attention_hook
from kvchat.engine.model.dense_attention import DenseManager
from kvchat.engine.model.fusion import one_row
from kvchat.engine.model.fusion.fused_attention import FusedAttention, fused_attention
from kvchat.engine.model.fusion.operations import MergedLinear, Norm, Operations, Output, merge_weights
from kvchat.engine.model.fusion.recognize import (
    ROTATION,
    is_attention,
    is_layer,
    is_plain,
    projections,
    rms_norm,
    rotates_halves,
)
from kvchat.engine.model.packed_rows import weight_of
from kvchat.engine.model.tolerances import logits_error, logits_tolerance

NORMS, MERGED, ROPE, LAYERS = "norms", "merged projections", "rope", "fused layers"
CHECKED_PROMPT, CHECKED_STEPS = 7, 3


@dataclass(frozen=True)
class FusionReport:
    """The kinds of modules that were fused, comma-separated (empty: none), and a note to the user."""

    fused: str = ""
    note: str = ""


def fuse(model: Any, kernels: ModuleType | None, plain: Tensor | None = None) -> FusionReport:
    """Fuse the modules of ``model`` that are recognized, and check the result.

    ``model`` is loaded, on its device, with kvchat's attention. If the fused model fails with ``kernels``
    (``kernels_for``), it is fused without them; if it fails without them too, it is restored. ``plain`` are its
    ``sample_logits``, if they are there.
    """
    plain = sample_logits(model) if plain is None else plain
    failure = ""
    for chosen in dict.fromkeys((kernels, None)):
        swaps = Swaps()
        try:
            _fuse_modules(model, Operations(chosen), swaps)
            _check(model, plain)
        except Exception as error:  # noqa: BLE001  # whatever a kernel or a module raises, the plain model is right
            swaps.undo()
            failure = failure or f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
        else:
            return FusionReport(", ".join(swaps.kinds), _note(model, swaps, failure))
    return FusionReport(note=f"The model runs without the fast path, which failed its check ({failure}).")


def kernels_for(device: torch.device) -> ModuleType | None:
    """The Triton kernels, on a GPU with Triton installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from kvchat.engine.model.fusion import kernels

    return kernels


class Swaps:
    """The forwards replaced so far. ``kinds`` are the kinds of modules fused, in order."""

    def __init__(self) -> None:
        self.kinds: dict[str, None] = {}
        self._before: dict[nn.Module, Callable[..., Any] | None] = {}

    def replace(self, module: nn.Module, forward: Callable[..., Any], kind: str = "") -> None:
        """Let ``module`` compute ``forward``."""
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
        return "The fast path recognizes no module of this model, which runs as transformers wrote it."
    return ""


# ---- fusing ----------------------------------------------------------------------------------------


def _fuse_modules(model: Any, operations: Operations, swaps: Swaps) -> None:
    norms = {module: norm for module in model.modules() if (norm := rms_norm(module))}
    merged = {
        module: MergedLinear(projections(module), operations) for module in model.modules() if is_attention(module)
    }
    layers = [module for module in model.modules() if is_layer(module, norms, merged)]
    for module, norm in norms.items():
        swaps.replace(module, partial(operations.normed, norm=norm), NORMS)
    for module, product in merged.items():
        for index, linear in enumerate(projections(module)):
            swaps.replace(linear, partial(product.part, index=index), MERGED)
    for module in model.modules():
        if rotates_halves(type(module).forward):
            swaps.replace(module, _rebound(type(module).forward, operations).__get__(module), ROPE)
    for layer in layers:
        attention = fused_attention(layer.self_attn, merged[layer.self_attn], operations, model.dtype)
        _fuse_layer(layer, norms, merged[layer.self_attn], attention, operations, swaps)
    head = model.get_output_embeddings()
    if is_plain(head) and LAYERS in swaps.kinds:
        swaps.replace(head, partial(operations.project, weight=weight_of(head), bias=head.bias), LAYERS)
    if model.device.type == "cpu" and (one_row.in_blocks() or one_row.widens(model.dtype, model.device)):
        for module in filter(is_plain, model.modules()):
            swaps.replace(module, partial(one_row.linear, weight=weight_of(module), bias=module.bias))


def _fuse_layer(
    layer: Any,
    norms: dict[nn.Module, Norm],
    merged: MergedLinear,
    fused: FusedAttention | None,
    operations: Operations,
    swaps: Swaps,
) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    first, second = norms[layer.input_layernorm], norms[layer.post_attention_layernorm]
    output = Output(attention.o_proj, operations)
    gate_up = merge_weights([mlp.gate_proj, mlp.up_proj])
    down = mlp.down_proj

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if fused and fused.suits(hidden_states, kwargs):
            attended = fused(hidden_states, kwargs["position_embeddings"], first, hidden_states)
        else:
            merged.norm, output.residual = first, hidden_states
            attended, _ = attention(hidden_states=hidden_states, **kwargs)
        active = operations.gated(attended, gate_up, second)
        return operations.project(active, weight_of(down), down.bias, None, attended)

    swaps.replace(attention.o_proj, output, LAYERS)
    swaps.replace(layer, forward, LAYERS)


def _rebound(forward: FunctionType, operations: Operations) -> FunctionType:
    """``forward`` with the global name of the rotation bound to ours; its module's own globals stay as they are."""
    names = forward.__globals__ | {ROTATION: partial(_rotate, operations, forward.__globals__[ROTATION])}
    rebound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebound.__kwdefaults__ = forward.__kwdefaults__
    return rebound


def _rotate(
    operations: Operations, own: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any
) -> Any:
    known = not args and cos.shape == (1, query.shape[2], query.shape[3]) and query.stride(3) == key.stride(3) == 1
    return operations.rotate(query, key, cos, sin) if known else own(query, key, cos, sin, *args)


# ---- the check -------------------------------------------------------------------------------------


def sample_logits(model: Any) -> Tensor:
    """The logits ``[tokens, vocab]`` of every token of a short prompt and of a few decoded ones, in float32."""
    backend, logits, start = DenseManager(), [], 0
    ids = torch.arange(CHECKED_PROMPT + CHECKED_STEPS, device=model.device)
    for chunk in torch.split(ids, [CHECKED_PROMPT, *[1] * CHECKED_STEPS]):
        positions = torch.arange(start, start + len(chunk), device=model.device)
        with torch.inference_mode(), attention_hook.bound(backend):
            output = model(chunk[None], position_ids=positions[None], use_cache=False)
        logits.append(output.logits[0].float())
        start += len(chunk)
    return torch.cat(logits)


def _check(model: Any, plain: Tensor) -> None:
    """Raise ArithmeticError if the logits differ from those of the ``plain`` model."""
    error, allowed = logits_error(model, sample_logits(model), plain, share=0.5), logits_tolerance(model)
    if not error <= allowed:
        raise ArithmeticError(f"its results differ by {error:.2g} (relative), {allowed:.2g} is allowed")
