"""Triton kernels on the fake CUDA device: interpreted, with every address that they load and store recorded."""

from __future__ import annotations

import torch
from support.fake_cuda import races
from support.fake_cuda.device import OnGpu, Refused, gpu, inner_of
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from kvchat.kv.ops.triton import recall
from kvchat.models.fuse import kernels, modules

# Operands of this many elements take minutes in the interpreter: torch computes the fused kernels' results instead.
LARGE = 2**16
MANY = 8  # tokens, for each of which the kernel that rotates heads runs again


def install() -> None:
    """Launch Triton kernels on the fake CUDA device."""
    plain = interpreter.GridExecutor.__call__

    def call(self, *args, **kwargs):
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not all(map(gpu.addresses, operands)):
            raise Refused("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        if away := {str(each.device) for each in operands if isinstance(each, OnGpu)} - {f"cuda:{gpu.current}"}:
            raise Refused(f"an illegal memory access was encountered: {away} while cuda:{gpu.current} is current")
        args, kwargs = tree_map(inner_of, args), tree_map(inner_of, kwargs)

        def run() -> races.Touched:
            with _disable_current_modes(), loads_and_stores.noting() as touched:
                plain(self, *args, **kwargs)
            return touched

        gpu.launch(self.fn.__name__, run, [inner_of(operand) for operand in operands])

    interpreter.GridExecutor.__call__ = call
    interpreter._interpreter = loads_and_stores = races.Interpreter(interpreter._interpreter)
    recall.measured_ctas = lambda device: recall.DEFAULT_CTAS  # nothing to measure
    _replace_large_fused_kernels()
    is_plain = modules.is_plain
    modules.is_plain = lambda module: is_plain(module) or _is_plain(module)


def _is_plain(module) -> bool:
    """Whether it is a Linear with unquantized weights; here parameters are ``OnGpu``, not of a class of their own."""
    own = type(module) is nn.Linear and "forward" not in module.__dict__
    return own and type(module.weight) is OnGpu and module.weight.is_floating_point()


def _replace_large_fused_kernels() -> None:
    """Compute the fused kernels of a model that is not tiny with torch's operations."""
    project, gated, rotate = kernels.project, kernels.gated, kernels.rotate

    def normalized(x, norm, eps):
        return x if norm is None else functional.rms_norm(x.float(), x.shape[-1:], norm.float(), eps)

    def wide(weight, scales):
        return weight.float() if scales is None else weight.float() * scales[:, None]

    def some_project(x, weight, bias=None, norm=None, eps=0.0, residual=None, scales=None, turns=None):
        if weight.numel() < LARGE:
            return project(x, weight, bias, norm, eps, residual, scales, turns)
        out = functional.linear(normalized(x, norm, eps).float(), wide(weight, scales))
        out = sum((t.float() for t in (bias, residual) if t is not None), out)
        if turns is not None:
            size, cos, sin = turns
            heads = out[..., :size].view(1, -1, 1, cos.shape[-1])
            out = torch.cat((_rotated(heads, cos.float(), sin.float()).view(1, 1, -1), out[..., size:]), -1)
        return out.to(x.dtype)

    def some_gated(x, weight, norm=None, eps=0.0, scales=None):
        if weight.numel() < 2 * LARGE:
            return gated(x, weight, norm, eps, scales)
        gate, up = functional.linear(normalized(x, norm, eps).float(), wide(weight, scales)).chunk(2, -1)
        return (functional.silu(gate) * up).to(x.dtype)

    def some_rotate(query, key, cos, sin, norms=()):
        if query.numel() < LARGE and query.shape[2] <= MANY:
            return rotate(query, key, cos, sin, norms)
        normed = [normalized(x, *norm).float() for x, norm in zip((query, key), norms or [(None, 0)] * 2, strict=True)]
        return tuple(_rotated(x, cos.float(), sin.float()).to(query.dtype).contiguous() for x in normed)

    kernels.project, kernels.gated, kernels.rotate = some_project, some_gated, some_rotate


def _rotated(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
