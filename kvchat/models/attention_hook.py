"""Hook into transformers: a registered attention function that passes Q, K and V to an attention backend.

A model loaded with ``attn_implementation="kvchat"`` projects and rotates as usual and then calls ``attention`` of this
module, which calls the backend bound to the running forward. The backend is in a context variable, because stablelm and
nemotron drop keyword arguments they do not know. No mask function is registered, so no mask is built: the backend knows
which token may attend to which.

``DenseManager`` is the reference backend, for tests and for attention weights, never for answers. ``install`` estimates
a layer's query for modes that choose one layer ahead. Hidden states change little from one layer to the next, so a
layer that gets its predecessor's input computes nearly the same query (InfiniGen, arXiv 2406.19707). A hook before each
decoder layer runs the next layer on the same input, up to its attention, and passes the query to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvchat.errors import EngineError, ModelError
from kvchat.kv.attention import AttentionSpec, capped, causal_bias, softmax
from kvchat.models.recurrent import RecurrentState

NAME = "kvchat"
# Keyword arguments that do not affect attention: positions are already in the rotated keys, and the others control what
# happens outside attention. Unknown arguments are refused, not ignored.
HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits", "output_attentions", "logits_to_keep"})
KNOWN = HARMLESS | {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
_backend: ContextVar[AttentionBackend] = ContextVar("kvchat_attention_backend")
_layers: WeakKeyDictionary[nn.Module, Layer] = WeakKeyDictionary()
_homes: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
ANGLES = "position_embeddings"
CLOSE = 0.9  # mean cosine of estimate and query: in SmolLM2 0.21 in layer 1, 0.66 in layer 2, at least 0.95 elsewhere
TOKENS = 32  # random tokens on which the cosine is measured


class AttentionBackend(Protocol):
    """Stores the K/V of one conversation and attends to it; for answers this is kv's ``KVManager``."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Store the new tokens' ``key`` [H, n, d_k], rotated, and ``value`` [H, n, d_v], and attend.

        ``query`` is [H_q, n, d_k]; the result is [H_q, n, d_v] in the query's dtype. Every call for a layer passes the
        same ``spec`` object.
        """
        ...


class Shape(NamedTuple):
    """Query heads, KV heads and the sizes of one head's key and value."""

    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int


class Layer(NamedTuple):
    """What the hook knows about an attention module.

    Attributes:
        number: index among the attending layers of its model.
        spec: attention rule.
        padded_shape: shape that all layers are padded to; None if all layers have the same shape.
        home: device of the K/V; None if the layer is on that device.
    """

    number: int
    spec: AttentionSpec
    padded_shape: Shape | None = None
    home: torch.device | None = None


def register() -> None:
    """Register ``attn_implementation="kvchat"`` with transformers; may be called more than once."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)


@contextmanager
def bound(backend: AttentionBackend) -> Iterator[None]:
    """Make forwards in this block store and attend with ``backend``; blocks nest, and each thread has its own."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def bound_backend() -> Any:
    """Return the backend of the running forward; None outside a forward."""
    return _backend.get(None)


def unify_layers(model: Any, attending: Sequence[int], padded_shape: Shape | None) -> None:
    """Number the ``attending`` layers, all of which have run, from 0 for backends, and pad them to ``padded_shape``.

    Other layers have no K/V. Smaller heads are padded with zeros, which changes no score; fewer KV heads are repeated.
    """
    for module in model.modules():
        if module in _layers:
            layer = _layers[module]
            number, shape = attending.index(module.layer_idx), padded_shape or layer.padded_shape
            _layers[module] = layer._replace(number=number, padded_shape=shape)


def attend_on(home: torch.device, layer: nn.Module) -> None:
    """Run the attention of a decoder ``layer`` on ``home``, the device of the K/V, although the layer is on another."""
    for module in layer.modules():
        _homes[module] = home


def forward(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    backend: AttentionBackend,
    *,
    logits: bool,
    state: RecurrentState | None = None,
    last: int = 1,
) -> Tensor | None:
    """Run the tokens ``ids`` [n] at ``positions`` [n] through ``model``, whose K/V ``backend`` stores.

    A hybrid model reads and changes ``state``; without it the model starts from an empty one. Returns the last token's
    logits [vocab] in float32, or [last, vocab] if ``last`` > 1. Without ``logits`` the head is not run and the result
    is None. Positions are always passed as a tensor: otherwise transformers counts with a Python int, which a CUDA
    graph would freeze.
    """
    options = {"position_ids": positions[None], **(state.arguments if state else {"use_cache": False})}
    with torch.inference_mode(), bound(backend):
        if not logits:
            model.base_model(ids[None], **options)
            return None
        output = model(ids[None], logits_to_keep=last, **options)
        of_last: Tensor = output.logits[0, -last:].float()  # some models return all tokens' logits
        return of_last[0] if last == 1 else of_last


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend like transformers: ``query`` [1, H_q, n, d_k], ``key`` [1, H, n, d_k], ``value`` [1, H, n, d_v].

    Returns [1, n, H_q, d_v], contiguous, and None for the weights.

    Raises:
        ModelError: the layer needs something that kvchat's attention does not do.
        EngineError: no backend is bound.
    """
    if attention_mask is not None or not kwargs.keys() <= KNOWN:
        _refuse_unknown(module, attention_mask, kwargs)
    layer, spec, padded_shape, home = _layers.get(module) or _register_layer(module, query.shape[-1], kwargs)
    backend = _backend.get(None)
    if backend is None:
        raise EngineError(
            "A forward pass ran without a KV manager.",
            f"{type(module).__name__} found none bound.",
            "Call attention_hook.forward, which binds one.",
        )
    heads = query[0], key[0], value[0]
    if home is not None:
        heads = _moved_heads(*heads, home)
    if padded_shape is None:
        attended = backend.attention(layer, *heads, spec)
    else:
        attended = backend.attention(layer, *_pad_heads(*heads, padded_shape), spec)[..., : value.shape[-1]]
    return attended.transpose(0, 1)[None].contiguous().to(query.device), None


def attend_token(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with one token's ``query [H_q, d_k]``, ``key [H, d_k]`` and ``value [H, d_v]``: ``[H_q, d_v]``."""
    layer, backend = _layers.get(module), bound_backend()
    if layer is None or layer.padded_shape or layer.home or not getattr(backend, "decodes", False):
        query, key, value = (heads[None, :, None] for heads in (query, key, value))
        return attention(module, query, key, value, None)[0][0, 0]
    attended: Tensor = backend.attend_token(layer.number, query, key, value, layer.spec)
    return attended


def _moved_heads(query: Tensor, key: Tensor, value: Tensor, home: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Move all three to another device, in one copy if their sizes allow it: for one token latency dominates."""
    if not query.shape[1:] == key.shape[1:] == value.shape[1:]:
        return query.to(home), key.to(home), value.to(home)
    together = torch.cat((query, key, value)).to(home)
    query, key, value = torch.split(together, [len(query), len(key), len(value)])
    return query, key, value


def _pad_heads(query: Tensor, key: Tensor, value: Tensor, padded_shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (x.repeat_interleave(padded_shape.kv_heads // len(x), 0) for x in (key, value))
    more_k, more_v = padded_shape.d_k - key.shape[-1], padded_shape.d_v - value.shape[-1]
    return pad(query, (0, more_k)), pad(key, (0, more_k)), pad(value, (0, more_v))


def _register_layer(module: nn.Module, d_k: int, kwargs: dict[str, Any]) -> Layer:
    """Record the number and the attention rule of a layer at its first call; later calls pass the same."""
    number: int | None = module.layer_idx  # type: ignore[assignment]
    if number is None or number < 0:
        raise _refusal(module, "does not say which layer it belongs to, so the K/V of layers cannot be told apart")
    if kwargs.get("dropout"):
        raise _refusal(module, "drops attention weights at random: the model is in training mode")
    if getattr(module, "is_causal", True) is False:
        raise _refusal(module, "attends to later tokens")
    home, scaling, sinks = _homes.get(module), kwargs.get("scaling"), kwargs.get("s_aux")
    spec = AttentionSpec(
        scaling=d_k**-0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=sinks if home is None or sinks is None else sinks.to(home),
    )
    layer = _layers[module] = Layer(number, spec, home=home)
    return layer


def _refuse_unknown(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise _refusal(module, "passes its own mask")
    unknown = sorted(name for name in kwargs.keys() - KNOWN if kwargs[name] is not None)
    if unknown:
        raise _refusal(module, f"passes {', '.join(unknown)}, which kvchat does not know")


def _refusal(module: nn.Module, reason: str) -> ModelError:
    return ModelError(
        "kvchat cannot run this model's attention.", f"{type(module).__name__} {reason}.", "Choose another model."
    )


def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Compute causal attention of the newest tokens; return ``[H_q, n, d_v]`` in the query's dtype, and the weights.

    ``value`` is ``[H, total, d_v]``; ``query``, ``key`` and ``spec`` as for ``weights``.
    """
    shares = weights(query, key, spec)
    return (shares @ _for_each_query_head(value, query)).to(query.dtype), shares


def weights(query: Tensor, key: Tensor, spec: AttentionSpec) -> Tensor:
    """Return attention weights ``[H_q, n, total]`` in float32.

    ``query [H_q, n, d_k]`` belongs to the last n of the ``total`` tokens of ``key [H, total, d_k]``. With learned sinks
    a row sums to less than 1.
    """
    scores = capped(query.float() @ _for_each_query_head(key, query).transpose(1, 2) * spec.scaling, spec)
    n, total = scores.shape[1:]
    scores += causal_bias(total - n, n, 0, spec.window, scores)
    return softmax(scores, None if spec.sinks is None else spec.sinks[:, None].expand(-1, n))


class DenseManager:
    """An ``AttentionBackend`` that stores all K/V of one conversation and attends to all of them."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend with ``query [H_q, n, d_k]`` to everything stored and the new ``key``, ``value [H, n, d]``.

        Raises:
            TypeError: keys and values have different dtypes; kvchat stores both in one.
        """
        if key.dtype != value.dtype:
            raise TypeError(f"keys are {key.dtype}, values {value.dtype}")
        if layer in self._stored:
            keys, values = self._stored[layer]
            key, value = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        self._stored[layer] = key, value
        return attend(query, key, value, spec)[0]


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(len(query) // len(x), 0)


class _QueryFound(Exception):  # not an error: ends a forward as soon as the query is computed
    def __init__(self, query: Tensor) -> None:
        self.query = query


class _QueryOnly:
    """An attention backend that ends the forward with the layer's query."""

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        raise _QueryFound(query)


def wants_query_only() -> bool:
    """Return True if the running layer only estimates its query, so that its key and value are not needed."""
    return isinstance(bound_backend(), _QueryOnly)


class _Trial(DenseManager):
    """Compares estimated queries with the real ones; ``close`` are the layers with good estimates."""

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


def install(model: Any, known: Collection[int] | None = None) -> frozenset[int]:
    """Make ``model``, which is on its device, estimate queries; return the attention layers that have estimates.

    A layer has none if its estimate is far from its query (as in the first layers), if its positions are rotated
    differently from its predecessor's, or if it needs inputs that its predecessor lacks. Layers ``known`` from an
    earlier call are not tried again.
    """
    pairs = _neighbors(model)
    if known is not None:
        for before, after, number in pairs:
            if number in known:
                before.register_forward_pre_hook(_estimator(after, number), with_kwargs=True)
        return frozenset(known)
    angles: dict[nn.Module, Any] = {}
    watches = [
        layer.register_forward_pre_hook(partial(_watch, angles), with_kwargs=True, prepend=True)  # before split's moves
        for pair in pairs
        for layer in pair[:2]
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
        ids, positions = drawn[None].to(model.device), torch.arange(TOKENS, device=model.device)[None]
        with torch.inference_mode(), bound(trial):
            model(ids, position_ids=positions, use_cache=False)
    except Exception:  # noqa: BLE001  # a layer may raise anything when run early; then no layer is
        trial.close.clear()
    for watch in watches:
        watch.remove()
    close = {number for before, after, number in pairs if number in trial.close and angles[before] is angles[after]}
    for number in hooks.keys() - close:
        hooks[number].remove()
    return frozenset(close)


def _neighbors(model: Any) -> list[tuple[nn.Module, nn.Module, int]]:
    """Return pairs of consecutive decoder layers, with the number of the attention layer in the second."""
    numbers = {module: _layers[module].number for module in model.modules() if module in _layers}
    found = []
    for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for before, after in zip(stack, list(stack)[1:], strict=False):
            inside = [numbers[module] for module in after.modules() if module in numbers]
            if len(inside) == 1:
                found.append((before, after, inside[0]))
    return found


def _watch(angles: dict[nn.Module, Any], module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    angles[module] = named.get(ANGLES)


def _estimator(after: nn.Module, number: int) -> Callable[..., None]:
    query_only = _QueryOnly()

    def estimate(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        backend = bound_backend()
        if not getattr(backend, "wants_ahead", False):
            return
        try:
            with bound(query_only):
                after(*arguments, **named)
        except _QueryFound as found:
            backend.estimated(number, found.query)

    return estimate
