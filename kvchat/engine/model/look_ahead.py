"""Estimates of a layer's query, made before the layer before runs, for modes that choose one layer ahead.

The stream of hidden states changes little from layer to layer, so that the query which a layer would ask of the input
of the layer before is close to its own (InfiniGen, arXiv 2406.19707). A hook before each decoder layer runs the
following one on the same input as far as its attention, whatever its norms, projections and rotations are, and hands
the query to the backend of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvchat.engine.model import attention_hook
from kvchat.engine.model.dense_attention import DenseManager
from kvchat.kv.attention_spec import AttentionSpec

ANGLES = "position_embeddings"
CLOSE = 0.9  # mean cosine to the query itself: of SmolLM2 0.21 in layer 1, 0.66 in layer 2, 0.95 and more in the others
TOKENS = 32  # of the text that this is measured on, drawn at random


class _Asked(Exception):  # no error: it ends a forward that has done what it is for
    """The attention of a layer was reached."""

    def __init__(self, query: Tensor) -> None:
        self.query = query


class _Asking:
    """An attention backend that ends the forward with the layer's query."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        raise _Asked(query)


class _Trial(DenseManager):
    """Compares estimated queries with those that are asked: ``close`` are the layers whose estimates serve."""

    wants_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.close: set[int] = set()
        self._estimates: dict[int, Tensor] = {}

    def estimated(self, layer: int, query: Tensor) -> None:
        self._estimates[layer] = query

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        estimate = self._estimates.get(layer)
        if estimate is not None and torch.cosine_similarity(query.float(), estimate.float(), -1).mean() >= CLOSE:
            self.close.add(layer)
        return super().attention(layer, query, key, value, spec)


def install(model: Any) -> frozenset[int]:
    """Let ``model``, loaded and on its device, estimate queries; return the attention layers that it can do it for.

    Left out are those whose estimates are far from their queries (as of the first layers), whose positions are rotated
    otherwise than the layer before's, and those that take more than the layer before is given.
    """
    pairs = _neighbors(model)
    given: dict[nn.Module, Any] = {}
    watches = [
        layer.register_forward_pre_hook(_watcher(given), with_kwargs=True) for pair in pairs for layer in pair[:2]
    ]
    hooks = {
        number: before.register_forward_pre_hook(_estimator(after, number), with_kwargs=True)
        for before, after, number in pairs
    }
    trial = _Trial()
    try:
        drawn = torch.randint(
            len(model.get_input_embeddings().weight), (TOKENS,), generator=torch.Generator().manual_seed(0)
        )
        ids, places = drawn[None].to(model.device), torch.arange(TOKENS, device=model.device)[None]
        with torch.inference_mode(), attention_hook.bound(trial):
            model(ids, position_ids=places, use_cache=False)
    except Exception:  # noqa: BLE001  # whatever a layer raises when it is asked early: it is asked no more
        trial.close.clear()
    for watch in watches:
        watch.remove()
    known = {number for before, after, number in pairs if number in trial.close and given[before] is given[after]}
    for number in hooks.keys() - known:
        hooks[number].remove()
    return frozenset(known)


def _neighbors(model: Any) -> list[tuple[nn.Module, nn.Module, int]]:
    """Decoder layers that follow one another, and the number of the attention layer in the second."""
    numbers = attention_hook.layer_numbers(model)
    found = []
    for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for before, after in zip(stack, list(stack)[1:], strict=False):
            inside = [numbers[module] for module in after.modules() if module in numbers]
            if len(inside) == 1:
                found.append((before, after, inside[0]))
    return found


def _watcher(given: dict[nn.Module, Any]) -> Callable[..., None]:
    def watch(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given[module] = named.get(ANGLES)

    return watch


def _estimator(after: nn.Module, number: int) -> Callable[..., None]:
    asking = _Asking()

    def estimate(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        backend = attention_hook.bound_backend()
        if not getattr(backend, "wants_ahead", False):
            return
        try:
            with attention_hook.bound(asking):
                after.forward(*arguments, **named)
        except _Asked as asked:
            backend.estimated(number, asked.query)

    return estimate
