"""Packings of weights on a CPU, by transformers' names, and packed experts of mixtures.

transformers stores the experts of a layer as two stacks of matrices and runs them through a replaceable function
(``use_experts_implementation``), which takes the activation, bias and norm of an architecture from the module. Here a
token is multiplied by the packed rows of its experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvchat.models.quantize import int4_rows, int8_rows
from kvchat.models.quantize.rows import STACKS, PackedRows, body


class Packing(NamedTuple):
    """A method of packing.

    Attributes:
        linears: finds the Linears of a model to pack.
        pack: packs a Linear; ``of_4_bits`` says that its weights already had 4 bits.
        fits: returns True if matrices with these numbers of rows and columns can be packed in a stack.
        stack: packs a stack of matrices; ``of_4_bits`` as above.
    """

    linears: Callable[[Any], Iterator[nn.Linear]]
    pack: Callable[..., None]
    fits: Callable[[int, int], bool]
    stack: Callable[..., PackedRows]


PACKINGS = {
    int8_rows.METHOD: Packing(body, int8_rows.pack, int8_rows.fits_stack, int8_rows.stack),
    int4_rows.METHOD: Packing(int4_rows.chosen, int4_rows.pack, int4_rows.fits, int4_rows.stack),
}


class Stack(NamedTuple):
    """The matrices of a layer's experts for one projection: the parameter ``name`` of ``module``.

    ``shape`` is ``[E, N, K]``: experts, and outputs and inputs of each.
    """

    module: Any
    name: str
    shape: torch.Size

    @property
    def weight(self) -> Tensor:
        weight: Tensor = getattr(self.module, self.name)
        return weight


def stacks(model: Any) -> Iterator[tuple[str, Stack]]:
    """Yield the stacks of experts in ``model`` that transformers runs through a replaceable function, with names."""
    for path, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
                yield f"{path}.{name}", Stack(module, name, _matrices(module, getattr(module, name)).shape)


def chosen_stacks(model: Any, method: str) -> Iterator[tuple[str, Stack]]:
    return ((path, stack) for path, stack in stacks(model) if PACKINGS[method].fits(*stack.shape[1:]))


def pack_stack(module: Any, name: str, value: Tensor, method: str, *, of_4_bits: bool = False) -> None:
    """Quantize ``value``, the stack ``name`` of a module of experts; ``of_4_bits`` as in ``Packing``."""
    attach_stack(module, name, PACKINGS[method].stack(_matrices(module, value), of_4_bits=of_4_bits))


def attach_stack(module: Any, name: str, rows: PackedRows) -> None:
    """Make a module of experts multiply by ``rows`` instead of its stack ``name``."""
    rows.data = nn.Parameter(rows.data, requires_grad=False)
    setattr(module, name, rows.data)
    module.__dict__.setdefault(STACKS, {})[name] = rows
    module.__dict__["forward"] = partial(_forward, module)


def _matrices(module: Any, stack: Tensor) -> Tensor:
    """Return the stack as ``[E, N, K]``; some architectures store the matrices transposed."""
    return stack.transpose(1, 2) if module.is_transposed else stack


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Send ``hidden_states [tokens, d]`` through the experts ``top_k_index [tokens, k]``; return the weighted sum."""
    routes = top_k_index.tolist()
    if len(routes) == 1:  # without gathering, a decoded token takes a tenth less time
        found = torch.cat([_expert(module, expert, hidden_states) for expert in routes[0]])
        return (found * top_k_weights[0, :, None]).sum(0, keepdim=True).to(hidden_states.dtype)
    tokens_of: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for token, experts in enumerate(routes):
        for place, expert in enumerate(experts):
            tokens_of[expert].append((token, place))
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert, pairs in tokens_of.items():
        tokens, places = torch.tensor(pairs, device=hidden_states.device).unbind(1)
        found = _expert(module, expert, hidden_states[tokens])
        total.index_add_(0, tokens, (found * top_k_weights[tokens, places, None]).float())
    return total.to(hidden_states.dtype)


def _expert(module: Any, expert: int, x: Tensor) -> Tensor:
    """Send ``x [tokens, d]`` through one expert: ``[tokens, d]``."""
    if module.has_gate:
        x = module._apply_gate(_projected(module, "gate_up_proj", expert, x))
    else:
        x = module.act_fn(_projected(module, "up_proj", expert, x))
    x = _projected(module, "down_proj", expert, x)
    return module.post_expert_norm(x) if getattr(module, "has_post_expert_norm", False) else x


def _projected(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """Multiply ``x [tokens, K]`` by one matrix of a stack: ``[tokens, N]``."""
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    rows: PackedRows | None = module.__dict__[STACKS].get(name)
    if rows is not None:
        return rows.matrix(expert).multiply(x, bias)
    return nn.functional.linear(x, _matrices(module, getattr(module, name))[expert], bias)
