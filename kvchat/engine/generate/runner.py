"""Prefill and the decode step: the model's forwards over the store, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvchat import units
from kvchat.engine.generate.graphs import GraphRunner, Recorder, recorder_for
from kvchat.engine.generate.prompt import control_ids
from kvchat.engine.model import attention_hook
from kvchat.engine.model.load import LoadedModel
from kvchat.engine.model.prefill_memory import bytes_per_token
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.manager import Store
from kvchat.kv.memory import budget
from kvchat.kv.modes.base import Mode, ModelTraits
from kvchat.kv.modes.sync_heads import Calibration

# Tokens of one prefill forward on a CPU. Smaller ones stop sooner and need less workspace, larger ones read the stored
# K/V less often: on two cores 512 is within 3 % of the best for the bundled model.
CHUNK = 512

# Tokens that what grows makes room for at least. On a GPU each time costs a new graph.
GROWTH_HEADROOM = {"cpu": 128, "cuda": 2048}


def geometry_of(model: LoadedModel) -> Geometry:
    """The model's K/V geometry."""
    m = model
    return Geometry(m.layers, m.q_heads, m.kv_heads, m.d_k, m.d_v, m.dtype, spare=GROWTH_HEADROOM[m.device.type])


def traits_of(model: LoadedModel, calibration: Calibration | None = None) -> ModelTraits:
    """What modes may need to know of the model; ``calibration`` is what was measured of its heads."""
    return ModelTraits(model.context, model.probe.rotations, model.probe.refusal, calibration)


class ModelRunner:
    """Runs a model's tokens through the store.

    ``chunk`` is the number of tokens of one prefill forward, None where the plan chooses by what memory is free;
    when it runs out all the same, fewer are tried, down to ``least``.
    """

    least = budget.CHUNKS[0]

    def __init__(self, model: LoadedModel, mode: Mode, recorder: Recorder | None = None) -> None:
        self.model = model
        self._control = control_ids(model.tokenizer)
        self.chunk = None if model.device.type == "cuda" else CHUNK
        self._token_bytes: int | None = None
        with torch.inference_mode():
            self.store = Store(geometry_of(model), model.device, mode)
            self._token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.graphs = GraphRunner(self.store, recorder or recorder_for(model.device))

    @property
    def badges(self) -> tuple[str, ...]:
        """Warnings about how it runs, for ``Snapshot.badges``."""
        return *self.store.host.badges, *self.store.ops.badges, *self.graphs.badges

    def prefill(self, ids: Sequence[int]) -> Generator[tuple[Sequence[int], Tensor | None]]:
        """Store ``ids`` chunk by chunk; yields each chunk when it is stored, with the last one the logits ``[vocab]``.

        May be abandoned between two chunks: what was yielded is stored.

        Raises:
            UsageError: the model has no such token.
            DoesNotFitError: there is no memory for even the smallest forward; what was yielded is stored.
        """
        self._check_tokens(ids)
        size = self.chunk or self._planned_chunk(len(ids))
        num_reachable = self.store.mode.num_reachable()
        done = 0
        try:
            while done < len(ids):
                chunk, logits = self._read(ids, done, size)
                size = len(chunk)
                done += size
                num_reachable += size
                yield chunk, logits
        finally:
            with torch.inference_mode(), self._explained("answering"):
                self.store.settle(num_reachable)

    def step(self, token: int) -> Tensor:
        """Store ``token``, in the mode at hand; the next token's logits ``[vocab]``, float32.

        Raises:
            UsageError: the model has no such token.
        """
        self._check_tokens((token,))
        with torch.inference_mode(), self._explained("decoding"), self.store.step(token in self._control):
            self._token.fill_(token)
            return self.graphs.run(self._forward_token)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        """On a GPU an id outside the vocabulary would end the process, not only the forward."""
        vocab = self.model.vocab
        unknown = next((token for token in ids if not 0 <= token < vocab), None)
        if unknown is not None:
            raise UsageError(f"There is no token {unknown}.", f"{self.model.name} has tokens 0 to {vocab - 1:,}.")

    def _forward_token(self) -> Tensor:
        """The device's part of a step: the logits ``[vocab]`` after the token in ``_token``."""
        with self.store.layers():
            position = self.store.position.view(1)
            logits = attention_hook.forward(self.model.model, self._token, position, self.store, logits=True)
        assert logits is not None
        return logits

    def _planned_chunk(self, tokens: int) -> int:
        """How many of ``tokens`` new ones go through the model at once; refused where not even the fewest can."""
        if self._token_bytes is None:
            with self._explained("reading the prompt"):
                self._token_bytes = bytes_per_token(self.model)
        store = self.store
        return budget.prefill_chunk(store.geometry, store.total, tokens, self._token_bytes, store.device)

    def _read(self, ids: Sequence[int], done: int, size: int) -> tuple[Sequence[int], Tensor | None]:
        """Store the next ``size`` of ``ids`` after ``done`` of them; half as many whenever memory runs out."""
        with self._explained("reading the prompt"):
            while True:
                chunk = ids[done : done + size]
                try:
                    return chunk, self._forward_chunk(chunk, last=done + len(chunk) == len(ids))
                except torch.OutOfMemoryError:
                    if len(chunk) <= self.least:
                        raise
                size = max(self.least, len(chunk) // 2)
                # What smaller forwards may use lies scattered in what torch keeps.
                torch.cuda.empty_cache()

    def _forward_chunk(self, chunk: Sequence[int], last: bool) -> Tensor | None:
        device = self.model.device
        pinned = [i for i, token in enumerate(chunk) if token in self._control]
        with torch.inference_mode(), self.store.prefill(len(chunk), pinned):
            positions = torch.arange(self.store.total, self.store.total + len(chunk), device=device)
            ids = torch.tensor(chunk, device=device)
            return attention_hook.forward(self.model.model, ids, positions, self.store, logits=last)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Name what ran out of memory. Nothing of the failed forward is stored.

        Raises:
            DoesNotFitError: instead of torch's out-of-memory error.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            store, total = self.store, self.store.total
            raise DoesNotFitError(
                f"The device ran out of memory while {doing}.",
                f"The {store.mode.name} mode holds {units.size(store.device_bytes, 2)} of K/V there for {total:,} "
                f"stored tokens: {str(error).splitlines()[0]}",
                "Everything stored is kept. Take a smaller budget or the streaming mode, and try again.",
            ) from error
