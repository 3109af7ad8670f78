"""The one seam to transformers: a registered attention function that hands K/V to a KV manager.

A model loaded with ``attn_implementation="kvchat"`` projects and rotates as always and then calls ``attention`` here,
which asks the manager bound to the running forward. The manager comes by a context variable and not as a keyword
argument of the model, because stablelm and nemotron drop the keyword arguments they do not know. No mask function is
registered, so no mask is built: the manager knows which token may see which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvchat.errors import EngineError, ModelError
from kvchat.kv.facts import LayerFacts

NAME = "kvchat"

# Keyword arguments that arrive and change nothing about attention: positions are in the rotated keys already, the
# others steer what happens outside attention. Everything else is refused, never swallowed.
HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits", "logits_to_keep", "output_hidden_states"})


class KeyValueManager(Protocol):
    """Keeps the K/V of one conversation and attends to it."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, facts: LayerFacts) -> Tensor:
        """Take the new tokens' ``key`` [H, n, d_k] and ``value`` [H, n, d_v], already rotated, and attend.

        ``query`` is [H_q, n, d_k]; the result is [H_q, n, d_v] in the query's dtype. ``facts`` is the same object at
        every call for a layer.
        """
        ...


_manager: ContextVar[KeyValueManager] = ContextVar("kvchat_manager")
_facts: WeakKeyDictionary[nn.Module, LayerFacts] = WeakKeyDictionary()


def register() -> None:
    """Make ``attn_implementation="kvchat"`` known to transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


@contextmanager
def bound(manager: KeyValueManager) -> Iterator[None]:
    """Forwards inside this block store to and attend by ``manager``; nests, and each thread has its own."""
    token = _manager.set(manager)
    try:
        yield
    finally:
        _manager.reset(token)


def forward(model: Any, ids: Tensor, positions: Tensor, manager: KeyValueManager, *, logits: bool) -> Tensor | None:
    """Run the tokens ``ids`` [n] at ``positions`` [n] through ``model`` with its K/V kept by ``manager``.

    Returns the last token's logits [vocab] in float32; None without ``logits``, when the head is not run either.
    Positions always go in as a tensor: left out, transformers counts with a Python int, which a CUDA graph freezes.
    """
    with torch.inference_mode(), bound(manager):
        if not logits:
            model.base_model(ids[None], position_ids=positions[None], use_cache=False)
            return None
        output = model(ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=1)
        last: Tensor = output.logits[0, -1]
        return last.float()


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query`` [1, H_q, n, d_k], ``key`` [1, H, n, d_k], ``value`` [1, H, n, d_v].

    Returns [1, n, H_q, d_v], contiguous, and no weights.
    """
    facts = _facts.get(module)
    if facts is None:
        facts = _facts[module] = layer_facts(module, query, attention_mask, **kwargs)
    manager = _manager.get(None)
    if manager is None:
        raise EngineError("A forward ran without a KV manager.", f"{type(module).__name__} found none bound.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = manager.attention(layer, query[0], key[0], value[0], facts)
    return attended.transpose(0, 1)[None].contiguous(), None


def layer_facts(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> LayerFacts:
    """What the keyword arguments of a layer's first call say about it.

    Raises:
        ModelError: the layer asks for something kvchat's attention does not do.
    """
    reason = _unsupported(module, attention_mask, dropout, others)
    if reason:
        raise ModelError("kvchat cannot run this model's attention.", f"{type(module).__name__} {reason}.")
    return LayerFacts(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)


def _unsupported(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> str | None:
    unknown = sorted(name for name in others.keys() - HARMLESS if others[name] is not None)
    if unknown:
        return f"passes {', '.join(unknown)}, which kvchat does not know"
    if attention_mask is not None:
        return "passes a mask of its own"
    if dropout:
        return "drops attention weights at random: the model is in training mode"
    if getattr(module, "is_causal", True) is False:
        return "attends to later tokens"
    return None
