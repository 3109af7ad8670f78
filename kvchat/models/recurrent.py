"""The recurrent state of hybrid models, and its snapshots.

Recurrent and convolution layers keep their state in a cache of transformers. K/V of attention layers pass through that
cache untouched: the KV manager stores them. A state cannot be rolled back token by token, so snapshots of it are kept
in RAM. After a truncation or a failed forward, ``restore`` copies the nearest snapshot back, and the tokens after it
are ``unread``: the runner processes them again before any others. If all layers attend, no method has an effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from packaging.version import Version
from safetensors.torch import load, save
from torch import Tensor

from kvchat.kv.manager import is_out_of_memory

ATTENTION = {"full_attention", "sliding_attention"}
RECURRENT = {"linear_attention", "conv"}
BOTH = {"hybrid", "hybrid_sliding"}

CONVOLVED = "conv_states"  # in transformers' layers, where it marks a layer as started

SNAPSHOTS = 8  # at most; each is as large as the state
EVERY = 256  # tokens between two snapshots, and so at most processed again after a short rollback
TAIL = 16  # tokens at a prompt's end, where a template begins the answer; they may change once the answer is history


Key = tuple[int, str, int]  # recurrent layer, transformers' name of the kind of state, and its number


class Snapshot(NamedTuple):
    """The state after ``tokens`` tokens, in RAM; never changed."""

    tokens: int
    tensors: dict[Key, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def encoded(self) -> bytes:
        """Return the tensors as a safetensors file."""
        named = {".".join(map(str, key)): tensor.contiguous() for key, tensor in self.tensors.items()}
        return bytes(save(named))

    @classmethod
    def decoded(cls, tokens: int, data: bytes) -> Self:
        """Return the snapshot after ``tokens`` tokens whose ``encoded`` form is ``data``."""
        named = ((*name.split("."), tensor) for name, tensor in load(data).items())
        return cls(tokens, {(int(at), kind, int(number)): tensor for at, kind, number, tensor in named})


@cache
def cache_argument() -> str:
    """Return the name of the argument for transformers' cache in a model's forward."""
    import transformers

    return "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class RecurrentState:
    """The state of one conversation with a model of transformers' ``config``.

    Attributes:
        reads_chunks: False for a model whose forward of several tokens starts from an empty state.
        exists: whether the model has a state.
        arguments: of its forward, besides tokens and positions.
    """

    def __init__(self, config: Any, reads_chunks: bool = True) -> None:
        self.reads_chunks = reads_chunks
        self._ids: list[int] = []
        self._read = 0
        self._snapshots: list[Snapshot] = []
        self._boundary = 0  # tokens before the last answer, or slightly fewer
        self._is_torn = False
        self._cache = _cache_of(config) if is_recurrent(config) else None
        layers = self._cache.layers if self._cache else []
        self._layers = [layer for layer in layers if hasattr(layer, "recurrent_states")]
        self.exists = self._cache is not None
        self.arguments: dict[str, Any] = (
            {cache_argument(): self._cache, "use_cache": True} if self.exists else {"use_cache": False}
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the model's device; they do not grow with the conversation."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def snapshot_bytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self._snapshots)

    @property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots, the newest last."""
        return self._snapshots.copy()

    @property
    def worth_saving(self) -> list[Snapshot]:
        """The snapshots from which to continue and to regenerate the last answer; the newest last."""
        earlier = [snapshot for snapshot in self._snapshots[:-1] if snapshot.tokens <= self._boundary]
        return earlier[-1:] + self._snapshots[-1:]

    @property
    def is_kept(self) -> bool:
        """True after a forward if every recurrent layer keeps its state in the cache, so that it can be copied."""
        return all(any(layer.is_conv_states_initialized.values()) for layer in self._layers)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors that a step reads and changes, which a CUDA graph records."""
        return tuple(tensor.data_ptr() for tensor in self._tensors().values())

    @property
    def unread(self) -> list[int]:
        """Stored tokens that the state lacks, to be processed before any others; empty between steps."""
        return self._ids[self._read :] if self.exists else []

    @property
    def position(self) -> int:
        return self._read

    def chunk(self, left: int, planned: int) -> int:
        """Return how many of the ``left`` new tokens the next prefill forward takes; memory allows ``planned``."""
        body = left - TAIL if left > TAIL else left
        if not self.exists or self.reads_chunks:
            return min(planned, body if self.exists else left)
        return body if not self._read else 1

    # ---- after a forward

    def commit(self, ids: Sequence[int]) -> None:
        """Record that a forward has processed the new tokens ``ids``."""
        self._ids.extend(ids if self.exists else ())
        self._read = len(self._ids)
        if self._read - self._last >= EVERY:
            self.keep()

    def commit_reread(self, tokens: int) -> None:
        """Record that a forward has processed the first ``tokens`` of ``unread``."""
        self._read += tokens

    def append_unread(self, ids: Sequence[int]) -> None:
        """Record that the tokens ``ids`` are stored again, but the state has not processed them."""
        self._ids.extend(ids if self.exists else ())

    @torch.inference_mode()
    def keep(self, before_answer: bool = False) -> None:
        """Take a snapshot of the state, and thin out the older ones.

        ``before_answer`` says that an answer begins at this token or a few tokens later. If memory is short no snapshot
        is taken, and a rollback processes more tokens again.
        """
        if before_answer:
            self._boundary = self._read
        if not self.exists or self._read == self._last:
            return
        try:
            copies = {key: tensor.to("cpu", copy=True) for key, tensor in self._tensors().items()}
            self._snapshots.append(Snapshot(self._read, copies))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if len(self._snapshots) > SNAPSHOTS:
            at = [snapshot.tokens for snapshot in self._snapshots]
            spare = min(range(1, SNAPSHOTS), key=lambda i: (at[i + 1] - at[i - 1]) / (at[-1] - at[i]))
            del self._snapshots[spare]

    # ---- rollback

    def truncate(self, tokens: int) -> None:
        del self._ids[tokens:]
        if self._read > tokens:
            self._go_back(tokens)

    def rollback(self) -> None:
        """Discard the state, which a failed forward may have left half-written."""
        self._go_back(len(self._ids))

    def adopt(self, ids: Sequence[int], snapshots: Sequence[Snapshot]) -> None:
        """Switch to another conversation with stored tokens ``ids`` and ``snapshots``."""
        self._ids, self._snapshots = list(ids if self.exists else ()), list(snapshots)
        self._go_back(len(ids))

    def _go_back(self, tokens: int) -> None:
        """Choose the last snapshot of at most ``tokens`` tokens, or an empty state, for ``restore``; cannot fail."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.tokens <= tokens]
        self._read, self._is_torn = self._last, self.exists

    @torch.inference_mode()
    def restore(self, device: torch.device) -> None:
        """Copy the snapshot of the last rollback to ``device``; call before each forward, and again if this fails."""
        if self._cache is None or not self._is_torn:
            return
        self._cache.reset()
        for (at, kind, number), saved in self._snapshots[-1].tensors.items() if self._snapshots else ():
            layer = self._layers[at]
            if getattr(layer, kind)[number] is None:  # no forward has run in this process yet
                layer.lazy_initialization(**{kind: saved.to(device)}, state_idx=number)
            getattr(layer, kind)[number].copy_(saved)
            layer.has_previous_state[number] |= kind == CONVOLVED
        self._is_torn = False

    @property
    def _last(self) -> int:
        return self._snapshots[-1].tokens if self._snapshots else 0

    def _tensors(self) -> dict[Key, Tensor]:
        return {
            (at, kind, number): tensor
            for at, layer in enumerate(self._layers)
            for kind in (CONVOLVED, "recurrent_states")
            for number, tensor in getattr(layer, kind).items()
            if tensor is not None
        }


def is_recurrent(config: Any) -> bool:
    """Return True if some layers of models with transformers' ``config`` keep a recurrent state in its cache."""
    return not (RECURRENT | BOTH).isdisjoint(layer_types(config))


def attending_layers(config: Any) -> list[int]:
    kinds = layer_types(config)
    return [layer for layer, kind in enumerate(kinds) if kind in ATTENTION | BOTH]


def layer_types(config: Any) -> list[str]:
    """Return transformers' name of each layer's kind."""
    text = config.get_text_config(decoder=True)
    return list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)


def _cache_of(config: Any) -> Any:
    from transformers.cache_utils import CacheLayerMixin, DynamicCache

    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin):
            layer.update = _passed_through
    return cache


def _passed_through(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return the K/V of the new tokens only: the KV manager has the others."""
    return keys, values
