"""The fast path: pieces of a loaded model swapped in place for ones of fewer kernels. No model is written anew.

Modules are recognized by what they compute on a few numbers, never by a model's name, and stay where they are: only the
``forward`` of single instances is replaced, so parameters, hooks and other models of the process know nothing of it.

  norms               RMSNorm as one kernel
  merged projections  q, k and v as one product; their weights become views of one tensor, so no memory is added
  rope                queries and keys turned by one kernel
  fused layers        RMSNorm -> attention -> RMSNorm -> gated MLP, each with its residual: a norm is done in the
                      projections behind it, a residual in the one before it, SiLU(gate) * up in those two

One decoded token's products are Triton kernels on a GPU (``kernels``), everything else is stock torch. torch.compile is
no alternative: it ends a graph at the KV manager in every layer, took 27 s for an 8B model (H200, static cache), and
does not put a norm into cuBLAS's products.

What was swapped is held against the plain model before anything is answered, and put back where it differs.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.engine.model import attention_hook
from kvchat.engine.model.self_test import DenseManager, relative_error, tolerance

NORMS, MERGED, ROPE, LAYERS = "norms", "merged projections", "rope", "fused layers"
ROTATION = "apply_rotary_pos_emb"  # transformers' name for it in every model that has one
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}  # only the first three read the layer's input
CHECKED_PROMPT, CHECKED_STEPS = 7, 3


@dataclass(frozen=True)
class FusionReport:
    """What runs otherwise than transformers wrote it (empty: nothing), and what a person should know of it."""

    swapped: str = ""
    note: str = ""


def accelerate(model: Any, kernels: ModuleType | None) -> FusionReport:
    """Swap in ``model`` (loaded, on its device, attending by the seam) whatever is recognized and proves right.

    With ``kernels`` (``kernels_for``) where they work, else without; a model that is right with neither is put back.
    """
    plain = _observe(model)
    failure = ""
    for chosen in dict.fromkeys((kernels, None)):
        swaps = Swaps()
        try:
            swap(model, Operations(chosen), swaps)
            _check(model, plain)
        except Exception as error:  # noqa: BLE001  # whatever a kernel or a module raises, the plain model is right
            swaps.undo()
            failure = failure or f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
        else:
            return FusionReport(", ".join(swaps.kinds), _note(model, swaps, failure))
    return FusionReport(note=f"The model runs without the fast path, which did not prove right ({failure}).")


def _note(model: Any, swaps: Swaps, failure: str) -> str:
    if failure:
        return f"The fast path does without its kernels ({failure})."
    if model.device.type == "cuda" and not swaps.kinds:
        return "The fast path knows nothing of this model: it runs as transformers wrote it."
    return ""


def kernels_for(device: torch.device) -> ModuleType | None:
    """The Triton kernels, where there is a GPU and Triton to run them."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from kvchat.engine.model.fusion import kernels

    return kernels


def swap(model: Any, operations: Operations, swaps: Swaps) -> None:
    """Replace what is recognized in ``model``, piece by piece, and note it in ``swaps``."""
    norms = {module: Norm.of(module) for module in model.modules() if _is_rms_norm(module)}
    merged = {
        module: MergedLinear(_projections(module), operations) for module in model.modules() if _is_attention(module)
    }
    layers = [module for module in model.modules() if _is_layer(module, norms, merged)]
    for module, norm in norms.items():
        swaps.replace(module, partial(operations.normed, norm=norm), NORMS)
    for module, product in merged.items():
        for index, linear in enumerate(_projections(module)):
            swaps.replace(linear, partial(product.part, index=index), MERGED)
    for module in model.modules():
        if _turns_halves(type(module).forward):
            swaps.replace(module, _rebound(type(module).forward, operations).__get__(module), ROPE)
    for layer in layers:
        _swap_layer(layer, norms, merged[layer.self_attn], operations, swaps)
    head = model.get_output_embeddings()
    if _is_plain(head) and LAYERS in swaps.kinds:
        swaps.replace(head, partial(operations.project, weight=head.weight, bias=head.bias), LAYERS)


class Swaps:
    """The forwards replaced, to be put back. ``kinds`` are what was swapped, in order."""

    def __init__(self) -> None:
        self.kinds: dict[str, None] = {}
        self._modules: list[nn.Module] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any], kind: str) -> None:
        """Let ``module`` compute ``forward``."""
        module.forward = forward
        self._modules.append(module)
        self.kinds[kind] = None

    def undo(self) -> None:
        """Every module computes what its class says again. Merged weights stay views of the same values."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()


# ---- operations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: ``weight`` [K] and epsilon."""

    weight: Tensor
    eps: float

    @staticmethod
    def of(module: Any) -> Norm:
        return Norm(module.weight, _epsilon(module) or 0.0)


class Operations:
    """What the swapped pieces compute with: stock torch, and for one token ``kernels`` where there are some."""

    def __init__(self, kernels: ModuleType | None) -> None:
        self._kernels = kernels
        self._sin: Tensor | None = None
        self._signed_sin: Tensor | None = None

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """RMSNorm of ``x [..., K]``."""
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x [..., K]``, normalized if ``norm`` is given, through ``weight [N, K]``, plus ``residual [..., N]``."""
        if self._kernels and _one_token(x):
            scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            result: Tensor = self._kernels.project(x, weight, bias, scale, eps, residual)
            return result
        projected = F.linear(x if norm is None else self.normed(x, norm), weight, bias)
        return projected if residual is None else projected.add_(residual)

    def gated(self, x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        """``silu(gate) * up`` of ``x [..., K]`` normalized; ``weight [2 N, K]`` is gate's above up's."""
        if self._kernels and _one_token(x):
            gate_weight, up_weight = weight.chunk(2)
            result: Tensor = self._kernels.gated(x, gate_weight, up_weight, norm.weight, norm.eps)
            return result
        gate, up = F.linear(self.normed(x, norm), weight).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn ``query [1, H_q, n, d]`` and ``key [1, H, n, d]`` by ``cos`` and ``sin [1, n, d]``, all d of them."""
        if self._kernels:
            turned: tuple[Tensor, Tensor] = self._kernels.rotate(query, key, cos, sin)
            return turned
        half = sin.shape[-1] // 2
        if sin is not self._sin:  # all layers of a forward get the same
            self._sin, self._signed_sin = sin, torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]
        cos, signed = cos[:, None], self._signed_sin
        assert signed is not None
        return (
            torch.addcmul(query * cos, query.roll(half, -1), signed),
            torch.addcmul(key * cos, key.roll(half, -1), signed),
        )


def _one_token(x: Tensor) -> bool:
    return x.numel() == x.shape[-1] and x.is_contiguous()


# ---- attention -------------------------------------------------------------------------------------


class MergedLinear:
    """Several Linears of one input as one product; ``norm``, set before the call, is applied to that input first.

    Whichever is called first computes all and keeps the others' parts until they are asked for with the same input.
    """

    def __init__(self, linears: list[nn.Linear], operations: Operations) -> None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.weight = _merge([linear.weight for linear in linears])
        self.bias = _merge(biases) if biases else None
        self.norm: Norm | None = None
        self._sizes = [linear.out_features for linear in linears]
        self._operations = operations
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output ``[..., N]`` of Linear ``index`` for ``x [..., K]``."""
        if x is not self._input or self._parts[index] is None:
            norm, self.norm = self.norm, None
            product = self._operations.project(x, self.weight, self.bias, norm)
            self._input, self._parts = x, list(torch.split(product, self._sizes, -1))
        part, self._parts[index] = self._parts[index], None
        if not any(other is not None for other in self._parts):
            self._input = None
        assert part is not None
        return part


class Output:
    """A Linear that adds the ``residual`` set before the call."""

    def __init__(self, linear: nn.Linear, operations: Operations) -> None:
        self._linear = linear
        self._operations = operations
        self.residual: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        residual, self.residual = self.residual, None
        return self._operations.project(x, self._linear.weight, self._linear.bias, None, residual)


def _merge(parameters: Sequence[Tensor]) -> Tensor:
    """All of them, one below the other; they become views of the result, so their old memory is free again."""
    merged = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = merged[start : start + len(parameter)]
        start += len(parameter)
    return merged


def _rebound(forward: FunctionType, operations: Operations) -> FunctionType:
    """``forward`` itself, in which one global name means our rotation: the module it is from keeps its own."""
    names = forward.__globals__ | {ROTATION: partial(_rotate, operations, forward.__globals__[ROTATION])}
    rebound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebound.__kwdefaults__ = forward.__kwdefaults__
    return rebound


def _rotate(
    operations: Operations, own: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any
) -> Any:
    known = not args and cos.shape == (1, query.shape[2], query.shape[3]) and query.stride(3) == key.stride(3) == 1
    return operations.rotate(query, key, cos, sin) if known else own(query, key, cos, sin, *args)


# ---- layers ----------------------------------------------------------------------------------------


def _swap_layer(
    layer: Any, norms: dict[nn.Module, Norm], merged: MergedLinear, operations: Operations, swaps: Swaps
) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    first, second = norms[layer.input_layernorm], norms[layer.post_attention_layernorm]
    output = Output(attention.o_proj, operations)
    gate_up = _merge([mlp.gate_proj.weight, mlp.up_proj.weight])
    down = mlp.down_proj

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        merged.norm, output.residual = first, hidden_states
        attended, _ = attention(hidden_states=hidden_states, **kwargs)
        active = operations.gated(attended, gate_up, second)
        return operations.project(active, down.weight, down.bias, None, attended)

    swaps.replace(attention.o_proj, output, LAYERS)
    swaps.replace(layer, forward, LAYERS)


# ---- recognition: by structure, then by what comes out for a few numbers ---------------------------


def _is_rms_norm(module: Any) -> bool:
    """``weight * x / rms(x)``; not Gemma's ``(1 + weight)``, and not a LayerNorm."""
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None or len(module._parameters) != 1:
        return False
    x = _numbers(weight) + 1
    measured = _outcome(module, x)
    expected = weight.detach().float() * x.float() * torch.rsqrt(x.float().square().mean() + eps)
    return measured is not None and relative_error(measured.float(), expected) < 8 * torch.finfo(weight.dtype).eps


def _is_attention(module: Any) -> bool:
    return _has(module, "q_proj", "k_proj", "v_proj") and _mergeable(_projections(module))


def _projections(module: Any) -> list[Any]:
    return [module.q_proj, module.k_proj, module.v_proj]


def _is_layer(module: Any, norms: dict[nn.Module, Norm], merged: dict[nn.Module, MergedLinear]) -> bool:
    """norm -> attention -> + -> norm -> gated MLP -> +, all of whose pieces can be fused."""
    if module._modules.keys() != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    if module.self_attn not in merged or not {module.input_layernorm, module.post_attention_layernorm} <= norms.keys():
        return False
    only_merged_reads = module.self_attn._modules.keys() <= ATTENTION
    return (
        only_merged_reads
        and _is_plain(module.self_attn.o_proj)
        and _is_gated_mlp(module.mlp)
        and _adds_like_a_layer(module)
    )


def _adds_like_a_layer(layer: nn.Module) -> bool:
    """Runs the layer's own code with numbers for its pieces: any other sum or order comes to another number."""
    pieces: dict[str, Callable[..., Any]] = {
        "input_layernorm": lambda x: x + 1,
        "self_attn": lambda hidden_states, **kwargs: (hidden_states * 3, None),
        "post_attention_layernorm": lambda x: x + 5,
        "mlp": lambda x: x * 7,
    }
    return _comes_to(_with_pieces(layer, pieces), 1.0, 7 * (1 + 3 * 2 + 5) + 1 + 3 * 2)


def _is_gated_mlp(mlp: Any) -> bool:
    """``down(silu(gate(x)) * up(x))``."""
    if not _has(mlp, "gate_proj", "up_proj", "down_proj") or not _mergeable([mlp.gate_proj, mlp.up_proj]):
        return False
    if mlp.gate_proj.bias is not None or not _is_plain(mlp.down_proj):
        return False
    pieces = {"gate_proj": lambda x: x * 2, "up_proj": lambda x: x + 3, "down_proj": lambda x: x * 5}
    silu = [float(F.silu(torch.tensor(2.0 * x))) for x in (1.0, -1.5)]
    stub = _with_pieces(mlp, pieces)
    return _comes_to(stub, 1.0, 5 * silu[0] * 4) and _comes_to(stub, -1.5, 5 * silu[1] * 1.5)


def _turns_halves(forward: Any) -> bool:
    """``forward`` calls a rotation that turns the first half of a head against its second."""
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return False
    query, key, angle = (_numbers(torch.empty(1, heads, 3, 8)) for heads in (2, 1, 1))
    cos, sin = angle[:, 0].cos(), angle[:, 0].sin()
    try:
        turned = forward.__globals__[ROTATION](query, key, cos, sin)
        expected = Operations(None).rotate(query, key, cos, sin)
        return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(turned, expected, strict=True))
    except Exception:  # noqa: BLE001  # it takes something else
        return False


def _mergeable(linears: list[Any]) -> bool:
    if not all(_is_plain(linear) for linear in linears):
        return False
    alike = {
        (x.in_features, x.bias is None, x.weight.dtype, x.weight.device, x.weight.is_contiguous()) for x in linears
    }
    return len(alike) == 1


def _is_plain(module: Any) -> bool:
    """A Linear of unquantized weights that nobody has changed."""
    return type(module) is nn.Linear and module.weight.is_floating_point() and "forward" not in module.__dict__


def _has(module: Any, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _epsilon(module: Any) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _with_pieces(module: nn.Module, pieces: dict[str, Callable[..., Any]]) -> nn.Module:
    """A copy of ``module`` with the same code and settings and ``pieces`` for the children so named."""
    stub = copy.copy(module)
    stub._modules = module._modules | {name: _Stub(function) for name, function in pieces.items()}
    return stub


class _Stub(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _comes_to(module: nn.Module, x: float, expected: float) -> bool:
    measured = _outcome(module, torch.full((1, 1, 1), x))
    return measured is not None and measured.shape == (1, 1, 1) and abs(float(measured) - expected) < 1e-4


def _outcome(module: nn.Module, x: Tensor) -> Tensor | None:
    """What the module's class computes for ``x``; None if it raises or gives no tensor."""
    try:
        with torch.inference_mode():
            result = type(module).forward(module, x)
    except Exception:  # noqa: BLE001  # it takes something else
        return None
    return result if isinstance(result, Tensor) else None


def _numbers(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


# ---- the check -------------------------------------------------------------------------------------


def _check(model: Any, plain: Tensor) -> None:
    """Raises ArithmeticError if the model computes something else than the ``plain`` one did."""
    error, allowed = relative_error(_observe(model), plain), tolerance(model)
    if not error <= allowed:
        raise ArithmeticError(f"its results differ by {error:.2g} (relative), {allowed:.2g} is allowed")


def _observe(model: Any) -> Tensor:
    """The logits ``[tokens, vocab]`` of every token of a short prompt and of a few decoded ones, in float32."""
    manager, logits, start = DenseManager(), [], 0
    ids = torch.arange(CHECKED_PROMPT + CHECKED_STEPS, device=model.device)
    for chunk in torch.split(ids, [CHECKED_PROMPT, *[1] * CHECKED_STEPS]):
        positions = torch.arange(start, start + len(chunk), device=model.device)
        with torch.inference_mode(), attention_hook.bound(manager):
            output = model(chunk[None], position_ids=positions[None], use_cache=False)
        logits.append(output.logits[0].float())
        start += len(chunk)
    return torch.cat(logits)
