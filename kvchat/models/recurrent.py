"""The recurrent state of hybrid models: what layers without K/V keep of the tokens read, and its snapshots.

Recurrent and convolution layers keep their state in a cache of transformers, which hands the K/V of attention layers on
untouched: those are the KV manager's. A state cannot be rolled back token by token, so copies of it are kept on the
host. After a truncation or a failed forward the nearest one is put back by ``restore``, and the tokens behind it are
``unread``: the runner reads them again before anything else. In a model whose layers all attend every method does
nothing much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from packaging.version import Version
from safetensors.torch import load, save
from torch import Tensor

from kvchat.kv.manager import is_out_of_memory

ATTENTION = {"full_attention", "sliding_attention"}
RECURRENT = {"linear_attention", "conv"}
BOTH = {"hybrid", "hybrid_sliding"}

CONVOLVED = "conv_states"  # in transformers' layers; those that have one note by it whether they read anything

SNAPSHOTS = 8  # kept at most; each is as large as the state
EVERY = 256  # tokens between two snapshots: so many are read again at most after a short way back
TAIL = 16  # tokens at a prompt's end, where templates begin the answer and change once it is history


Key = tuple[int, str, int]  # which recurrent layer, the name of its kind of state in transformers, and the number of it


class Snapshot(NamedTuple):
    """The state after ``tokens`` tokens, in host memory; never changed."""

    tokens: int
    tensors: dict[Key, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def encoded(self) -> bytes:
        """The tensors as a safetensors file."""
        named = {".".join(map(str, key)): tensor.contiguous() for key, tensor in self.tensors.items()}
        return bytes(save(named))

    @classmethod
    def decoded(cls, tokens: int, data: bytes) -> Self:
        """The snapshot after ``tokens`` tokens whose ``encoded`` form is ``data``."""
        named = ((*name.split("."), tensor) for name, tensor in load(data).items())
        return cls(tokens, {(int(at), kind, int(number)): tensor for at, kind, number, tensor in named})


def cache_argument() -> str:
    """The argument of a model's forward that is transformers' cache."""
    import transformers

    return "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class RecurrentState:
    """The state of one conversation with a model of transformers' ``config``.

    ``reads_chunks`` is False for a model whose forward of several tokens starts empty instead of going on from a state;
    ``exists`` says that the model has a state, ``arguments`` are those of its forward besides its tokens.
    """

    def __init__(self, config: Any, reads_chunks: bool = True) -> None:
        self.reads_chunks = reads_chunks
        self._ids: list[int] = []
        self._read = 0
        self._snapshots: list[Snapshot] = []
        self._boundary = 0  # tokens before the last answer, or a few less
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
        """Those that are kept, the newest last."""
        return self._snapshots.copy()

    @property
    def worth_saving(self) -> list[Snapshot]:
        """The newest one, to go on from, and the one to answer the last question again from."""
        earlier = [snapshot for snapshot in self._snapshots[:-1] if snapshot.tokens <= self._boundary]
        return earlier[-1:] + self._snapshots[-1:]

    @property
    def is_kept(self) -> bool:
        """After a forward: every recurrent layer keeps its state in the cache, where it can be copied."""
        return all(any(layer.is_conv_states_initialized.values()) for layer in self._layers)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie that a step reads and changes; a graph holds them as it holds the K/V."""
        return tuple(tensor.data_ptr() for tensor in self._tensors().values())

    @property
    def unread(self) -> list[int]:
        """The stored tokens that the state has not read, to be read again before any other; empty between steps."""
        return self._ids[self._read :] if self.exists else []

    @property
    def position(self) -> int:
        return self._read

    def chunk(self, left: int, planned: int) -> int:
        """Number of the ``left`` new tokens that the next prefill forward takes; ``planned`` is what memory allows."""
        body = left - TAIL if left > TAIL else left
        if not self.exists or self.reads_chunks:
            return min(planned, body if self.exists else left)
        return body if not self._read else 1

    # ---- after a forward

    def commit(self, ids: Sequence[int]) -> None:
        """Note that a forward has read the new tokens ``ids``."""
        self._ids.extend(ids if self.exists else ())
        self._read = len(self._ids)
        if self._read - self._last >= EVERY:
            self.keep()

    def commit_reread(self, tokens: int) -> None:
        """Note that a forward has read the first ``tokens`` of ``unread``."""
        self._read += tokens

    def append_unread(self, ids: Sequence[int]) -> None:
        """Note that the tokens ``ids`` are stored again; the state has not read them yet."""
        self._ids.extend(ids if self.exists else ())

    @torch.inference_mode()
    def keep(self, before_answer: bool = False) -> None:
        """Keep a snapshot of the state as it is; of many, those further back lie further apart.

        ``before_answer`` says that an answer begins here, or a few tokens later. Where there is no memory for it none
        is kept: a way back is longer then.
        """
        if before_answer:
            self._boundary = self._read
        if not self.exists or self._read == self._last:
            return
        try:
            kept = {key: tensor.to("cpu", copy=True) for key, tensor in self._tensors().items()}
            self._snapshots.append(Snapshot(self._read, kept))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if len(self._snapshots) > SNAPSHOTS:
            at = [snapshot.tokens for snapshot in self._snapshots]
            spare = min(range(1, SNAPSHOTS), key=lambda i: (at[i + 1] - at[i - 1]) / (at[-1] - at[i]))
            del self._snapshots[spare]

    # ---- back

    def truncate(self, tokens: int) -> None:
        del self._ids[tokens:]
        if self._read > tokens:
            self._go_back(tokens)

    def rollback(self) -> None:
        """Drop the state that a failed forward may have left half written."""
        self._go_back(len(self._ids))

    def adopt(self, ids: Sequence[int], snapshots: Sequence[Snapshot]) -> None:
        """Replace the stored tokens by ``ids`` of another conversation, of which these are snapshots."""
        self._ids, self._snapshots = list(ids if self.exists else ()), list(snapshots)
        self._go_back(len(ids))

    def _go_back(self, tokens: int) -> None:
        """Note the nearest snapshot of at most ``tokens`` tokens, or the beginning, for ``restore``; cannot fail."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.tokens <= tokens]
        self._read, self._is_torn = self._last, self.exists

    @torch.inference_mode()
    def restore(self, device: torch.device) -> None:
        """Put the snapshot back that was gone back to; due before a forward on ``device``, and again if it fails."""
        if self._cache is None or not self._is_torn:
            return
        self._cache.reset()
        if self._snapshots:
            self._put_back(self._snapshots[-1], device)
        self._is_torn = False

    def _put_back(self, snapshot: Snapshot, device: torch.device) -> None:
        for (at, kind, number), kept in snapshot.tensors.items():
            layer = self._layers[at]
            if getattr(layer, kind)[number] is None:  # nothing was read yet in this process
                layer.lazy_initialization(**{kind: kept.to(device)}, state_idx=number)
            getattr(layer, kind)[number].copy_(kept)
            layer.has_previous_state[number] |= kind == CONVOLVED

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
    """True if some layers of models with transformers' ``config`` keep a recurrent state in its cache."""
    return not (RECURRENT | BOTH).isdisjoint(layer_types(config))


def attending_layers(config: Any) -> list[int]:
    kinds = layer_types(config)
    return [layer for layer, kind in enumerate(kinds) if kind in ATTENTION | BOTH]


def layer_types(config: Any) -> list[str]:
    """transformers' name of each layer's kind."""
    text = config.get_text_config(decoder=True)
    return list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)


def _cache_of(config: Any) -> Any:
    from transformers.cache_utils import CacheLayerMixin, DynamicCache

    cache = DynamicCache(config=config)
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin):
            layer.update = _handed_on
    return cache


def _handed_on(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """The K/V of the new tokens alone: the KV manager has the others."""
    return keys, values
