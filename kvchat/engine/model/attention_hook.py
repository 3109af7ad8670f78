"""The hook into transformers: a registered attention function that hands K/V to an attention backend.

A model loaded with ``attn_implementation="kvchat"`` projects and rotates as always and then calls ``attention`` here,
which calls the backend bound to the running forward. The backend comes by a context variable and not as a keyword
argument of the model, because stablelm and nemotron drop the keyword arguments they do not know. No mask function is
registered, so no mask is built: the backend knows which token may attend to which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvchat.engine.model.recurrent_state import RecurrentState
from kvchat.errors import EngineError, ModelError
from kvchat.kv.attention_spec import AttentionSpec

NAME = "kvchat"

# Keyword arguments that arrive and change nothing about attention: positions are in the rotated keys already, the
# others steer what happens outside attention. Everything else is refused, never swallowed.
HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits", "output_attentions", "logits_to_keep"})
KNOWN = HARMLESS | {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}


class AttentionBackend(Protocol):
    """Keeps the K/V of one conversation and attends to it; in answers this is kv's ``KVManager``."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Take the new tokens' ``key`` [H, n, d_k] and ``value`` [H, n, d_v], already rotated, and attend.

        ``query`` is [H_q, n, d_k]; the result is [H_q, n, d_v] in the query's dtype. ``spec`` is the same object at
        every call for a layer.
        """
        ...


_backend: ContextVar[AttentionBackend] = ContextVar("kvchat_attention_backend")


class Shape(NamedTuple):
    """Query heads, KV heads and the sizes of one head's key and value."""

    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int


class Layer(NamedTuple):
    """An attention module's number among those of its model, its rule, and the shape of all layers.

    ``common`` is None where all layers have one shape anyway.
    """

    number: int
    spec: AttentionSpec
    common: Shape | None = None


_known: WeakKeyDictionary[nn.Module, Layer] = WeakKeyDictionary()


def register() -> None:
    """Make ``attn_implementation="kvchat"`` known to transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


@contextmanager
def bound(backend: AttentionBackend) -> Iterator[None]:
    """Forwards inside this block store to and attend by ``backend``; blocks nest, and each thread has its own."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def bound_backend() -> Any:
    """The backend of the forward that runs; None outside of one."""
    return _backend.get(None)


def layer_numbers(model: Any) -> dict[nn.Module, int]:
    """The attention modules that have been run, and their layers' numbers for backends."""
    return {module: _known[module].number for module in model.modules() if module in _known}


def unify_layers(model: Any, attending: Sequence[int], common: Shape | None) -> None:
    """Let backends see the layers ``attending``, which have all been run, as 0, 1, ... and all of the shape ``common``.

    The others have no K/V. Zeros fill up smaller heads and change no score; fewer KV heads are repeated.
    """
    for module in model.modules():
        if module in _known:
            known = _known[module]
            _known[module] = Layer(attending.index(module.layer_idx), known.spec, common or known.common)


def forward(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    backend: AttentionBackend,
    *,
    logits: bool,
    state: RecurrentState | None = None,
) -> Tensor | None:
    """Run the tokens ``ids`` [n] at ``positions`` [n] through ``model`` with its K/V kept by ``backend``.

    A hybrid model reads and changes ``state``; without one it starts empty. Returns the last token's logits [vocab] in
    float32; None without ``logits``, when the head is not run either.
    Positions always go in as a tensor: left out, transformers counts with a Python int, which a CUDA graph freezes.
    """
    beside = state.arguments if state else {"use_cache": False}
    with torch.inference_mode(), bound(backend):
        if not logits:
            model.base_model(ids[None], position_ids=positions[None], **beside)
            return None
        output = model(ids[None], position_ids=positions[None], logits_to_keep=1, **beside)
        last: Tensor = output.logits[0, -1]
        return last.float()


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: ``query`` [1, H_q, n, d_k], ``key`` [1, H, n, d_k], ``value`` [1, H, n, d_v].

    Returns [1, n, H_q, d_v], contiguous, and no weights.

    Raises:
        ModelError: the layer asks for something kvchat's attention does not do.
        EngineError: no backend is bound.
    """
    if attention_mask is not None or not kwargs.keys() <= KNOWN:
        _refuse_unknown(module, attention_mask, kwargs)
    layer, spec, common = _known.get(module) or _met(module, query.shape[-1], kwargs)
    backend = _backend.get(None)
    if backend is None:
        raise EngineError(
            "A forward ran without a KV manager.",
            f"{type(module).__name__} found none bound.",
            "Call attention_hook.forward, which binds one.",
        )
    if common is None:
        attended = backend.attention(layer, query[0], key[0], value[0], spec)
    else:
        attended = backend.attention(layer, *_filled(query[0], key[0], value[0], common), spec)[..., : value.shape[-1]]
    return attended.transpose(0, 1)[None].contiguous(), None


def _filled(query: Tensor, key: Tensor, value: Tensor, common: Shape) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (x.repeat_interleave(common.kv_heads // len(x), 0) for x in (key, value))
    more_k, more_v = common.d_k - key.shape[-1], common.d_v - value.shape[-1]
    return pad(query, (0, more_k)), pad(key, (0, more_k)), pad(value, (0, more_v))


def _met(module: nn.Module, d_k: int, kwargs: dict[str, Any]) -> Layer:
    number: int | None = module.layer_idx  # type: ignore[assignment]
    if number is None or number < 0:
        raise _refusal(module, "does not tell which layer it attends for, so its layers' K/V cannot be kept apart")
    known = _known[module] = Layer(number, _spec_of(module, d_k, kwargs))
    return known


def _spec_of(module: nn.Module, d_k: int, kwargs: dict[str, Any]) -> AttentionSpec:
    """The attention rule of a layer, read from its first call; later calls pass the same."""
    if kwargs.get("dropout"):
        raise _refusal(module, "drops attention weights at random: the model is in training mode")
    if getattr(module, "is_causal", True) is False:
        raise _refusal(module, "attends to later tokens")
    scaling = kwargs.get("scaling")
    return AttentionSpec(
        scaling=d_k**-0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )


def _refuse_unknown(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise _refusal(module, "passes a mask of its own")
    unknown = sorted(name for name in kwargs.keys() - KNOWN if kwargs[name] is not None)
    if unknown:
        raise _refusal(module, f"passes {', '.join(unknown)}, which kvchat does not know")


def _refusal(module: nn.Module, reason: str) -> ModelError:
    return ModelError(
        "kvchat cannot run this model's attention.", f"{type(module).__name__} {reason}.", "Choose another model."
    )
