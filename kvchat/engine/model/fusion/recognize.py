"""Recognize what a module computes: by its structure, then by its output for a few numbers, never by a model's name.

Each function runs the module's own code, with simple functions for its children where it has some, and compares the
result with that of the computation it is taken for.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvchat.engine.model import tolerances
from kvchat.engine.model.fusion.operations import Norm, Operations
from kvchat.engine.model.packed_rows import PackedRows, weight_of

ROTATION = "apply_rotary_pos_emb"  # transformers' name for it in every model that has one
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}  # only the first three read the layer's input


def rms_norm(module: Any) -> Norm | None:
    """The RMSNorm that ``module`` computes: ``weight * x / rms(x)``, neither Gemma's ``(1 + weight)`` nor LayerNorm."""
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None or len(module._parameters) != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gated norm is one only without its gate
        return None
    x = numbers(weight) + 1
    measured = _outcome(module, x)
    expected = weight.detach().float() * x.float() * torch.rsqrt(x.float().square().mean() + eps)
    if measured is None:
        return None
    allowed = tolerances.NORM_ROUNDINGS * torch.finfo(weight.dtype).eps
    return Norm(weight, eps) if tolerances.relative_error(measured.float(), expected) < allowed else None


def is_attention(module: Any) -> bool:
    """``module`` projects its input to queries, keys and values by Linears that can be merged."""
    return _has(module, "q_proj", "k_proj", "v_proj") and _mergeable(projections(module))


def projections(module: Any) -> list[Any]:
    """The Linears of queries, keys and values of an attention module."""
    return [module.q_proj, module.k_proj, module.v_proj]


def is_layer(module: Any, norms: Collection[nn.Module], attentions: Collection[nn.Module]) -> bool:
    """``module`` is norm -> attention -> + -> norm -> gated MLP -> +, with all of its parts recognized too."""
    if module._modules.keys() != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    if module.self_attn not in attentions:
        return False
    if module.input_layernorm not in norms or module.post_attention_layernorm not in norms:
        return False
    only_merged_read = module.self_attn._modules.keys() <= ATTENTION
    return (
        only_merged_read
        and is_plain(module.self_attn.o_proj)
        and _is_gated_mlp(module.mlp)
        and _adds_like_a_layer(module)
    )


def _adds_like_a_layer(layer: nn.Module) -> bool:
    """Another sum or order of the parts gives another number."""
    parts: dict[str, Callable[..., Any]] = {
        "input_layernorm": lambda x: x + 1,
        "self_attn": lambda hidden_states, **kwargs: (hidden_states * 3, None),
        "post_attention_layernorm": lambda x: x + 5,
        "mlp": lambda x: x * 7,
    }
    return _results_in(_with_stubs(layer, parts), 1.0, 7 * (1 + 3 * 2 + 5) + 1 + 3 * 2)


def _is_gated_mlp(mlp: Any) -> bool:
    """``down(silu(gate(x)) * up(x))``."""
    if not _has(mlp, "gate_proj", "up_proj", "down_proj") or not _mergeable([mlp.gate_proj, mlp.up_proj]):
        return False
    if mlp.gate_proj.bias is not None or not is_plain(mlp.down_proj):
        return False
    parts = {"gate_proj": lambda x: x * 2, "up_proj": lambda x: x + 3, "down_proj": lambda x: x * 5}
    silu = [float(F.silu(torch.tensor(2.0 * x))) for x in (1.0, -1.5)]
    stub = _with_stubs(mlp, parts)
    return _results_in(stub, 1.0, 5 * silu[0] * 4) and _results_in(stub, -1.5, 5 * silu[1] * 1.5)


def rotates_halves(forward: Any) -> bool:
    """``forward`` calls a rotation that pairs the first half of a head with its second."""
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return False
    query, key, angle = (numbers(torch.empty(1, heads, 3, 8)) for heads in (2, 1, 1))
    cos, sin = angle[:, 0].cos(), angle[:, 0].sin()
    try:
        rotated = forward.__globals__[ROTATION](query, key, cos, sin)
        expected = Operations(None).rotate(query, key, cos, sin)
        pairs = zip(rotated, expected, strict=True)
        return all(torch.allclose(one, other, atol=tolerances.ROTATION) for one, other in pairs)
    except Exception:  # noqa: BLE001  # it takes something else
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
    """``module`` is a Linear with its own forward: of unquantized weights, or packed on a CPU."""
    if type(module) is not nn.Linear:
        return False
    weight, forward = weight_of(module), module.__dict__.get("forward")
    if isinstance(weight, PackedRows):
        return bool(forward == weight.forward)
    # A quantizer's own tensors say they are floating point; they can be sliced, and often not put together again.
    return type(weight) is nn.Parameter and weight.is_floating_point() and forward is None


def _has(module: Any, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _epsilon(module: Any) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _with_stubs(module: nn.Module, functions: dict[str, Callable[..., Any]]) -> nn.Module:
    """A copy of ``module`` with the same code and settings, whose children compute ``functions`` by name."""
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
    return abs(float(measured) - expected) < tolerances.SMALL_NUMBERS


def _outcome(module: nn.Module, x: Tensor) -> Tensor | None:
    """The result of the module's class for ``x``; None if it raises or gives no tensor."""
    try:
        with torch.inference_mode():
            result = type(module).forward(module, x)
    except Exception:  # noqa: BLE001  # it takes something else
        return None
    return result if isinstance(result, Tensor) else None


def numbers(like: Tensor) -> Tensor:
    """Random numbers of a tensor's shape, dtype and device, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)
