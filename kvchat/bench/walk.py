"""Decodes a text token by token in any mode, and reports which tokens attention read at each step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvchat.config.modes import FullParameters, ModeParameters
from kvchat.engine import calibration
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError, UsageError
from kvchat.kv import inspect
from kvchat.kv.manager import explained
from kvchat.kv.modes import build
from kvchat.kv.modes.sync_heads import Calibration
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Finished, Sampling, Turn

WARM_UP = 2  # steps


class Walk:
    """One text in the K/V of one model; any inspection of the last step waits for the device."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.runner = ModelRunner(model, build(FullParameters(), geometry_of(model), traits_of(model)))
        self._state = self.runner.kv.state
        self._calibration: Calibration | None = calibration.find(model.revision)
        self._prompt: list[int] = []

    def begin(
        self, prompt: Sequence[int], parameters: ModeParameters, more: int = 0, quantizes: bool = False
    ) -> Tensor:
        """Store only the prompt, then enter a mode; return the next token's logits ``[vocab]``.

        It is stored in full precision or, with ``quantizes``, in 8-bit pages, which later tokens of the prompt read.

        Raises:
            DoesNotFitError: the prompt, or the prompt with ``more`` tokens in a mode that cannot exceed the context, is
                longer than the model's context, or memory ran out.
            UsageError: the mode refuses its parameters, or the prompt is too short for a calibration that it needs.
        """
        self._refuse_beyond_context(len(prompt))
        # No mode changes a prompt's K/V: if they are still stored, only the last token is prefilled again.
        kept = len(prompt) - 1 if self._prompt == list(prompt) and self._state.quantizes == quantizes else 0
        self._prompt = []
        self.runner.truncate(kept)
        self._state.quantize_pages(quantizes)
        logits = [made for _, made in self.runner.prefill(prompt[kept:])][-1]
        assert logits is not None
        self.enter(parameters, prompt)
        if self.runner.kv.mode.context_policy.is_final:
            self._refuse_beyond_context(len(prompt) + more)
        self._prompt = list(prompt)
        return logits

    def _refuse_beyond_context(self, tokens: int) -> None:
        if tokens > self.model.context:
            raise DoesNotFitError(
                "The text does not fit the model.",
                f"{tokens:,} tokens are needed; {self.model.name} reads {self.model.context:,}.",
                "Use a shorter context.",
            )

    def enter(self, parameters: ModeParameters, prompt: Sequence[int] = ()) -> None:
        """Enter a mode; if it needs a calibration that the model lacks, calibrate on the ``prompt``.

        Raises:
            KvchatError: the same as ``begin``.
        """
        mode = build(parameters, geometry_of(self.model), traits_of(self.model, self._calibration))
        if mode.needs_calibration:
            self._calibration = calibration.on_prompt(self.model, prompt)
            mode = build(parameters, geometry_of(self.model), traits_of(self.model, self._calibration))
        with torch.inference_mode(), explained(self.runner.kv, f"entering the {mode.name} mode"):
            self.runner.kv.switch(mode)
        if mode.needs_calibration:
            raise UsageError(
                "The model's heads are not calibrated.",
                f"{len(prompt):,} tokens are too few to calibrate them on.",
                "Use a longer context, or run `kvchat calibrate` first.",
            )

    def step(self, token: int) -> Tensor:
        """Decode ``token`` in the mode; return the next token's logits ``[vocab]``, float32."""
        return self.runner.step(token)

    def times(self, ids: Sequence[int], prompt: int, parameters: ModeParameters) -> tuple[float, float]:
        """Return seconds to prefill the first ``prompt`` ids and enter a mode, and mean seconds per step of the others.

        The first steps, which may compile loops, do not count.
        """
        self.begin(ids[:1], FullParameters())  # drops the stored prompt, which would not be prefilled again
        began = time.perf_counter()
        float(self.begin(ids[:prompt], parameters, len(ids) - prompt)[0])  # waits for the device
        prefilled = time.perf_counter()
        for token in ids[prompt : prompt + WARM_UP]:
            float(self.step(token)[0])
        warm, counted = time.perf_counter(), ids[prompt + WARM_UP :]
        for token in counted:
            float(self.step(token)[0])
        return prefilled - began, (time.perf_counter() - warm) / max(1, len(counted))

    @property
    def queries(self) -> Tensor:
        """The last token's rotated queries, ``[layers, H_q, d_k]`` in float32."""
        return self._state.query.float()

    def attended(self, layer: int) -> Tensor:
        """Return which stored tokens the last token read, as a mask: bool ``[H, total]``."""
        return inspect.attended(self._state, layer)

    def tokens_read(self) -> float:
        """Return how many stored tokens the last token read, averaged over layers and KV heads."""
        counts = inspect.attended_counts(self._state).sum().item()
        return counts / (self.model.layers * self.model.kv_heads)

    def weights(self, layer: int) -> Tensor:
        """Return the last token's attention weights over all stored tokens, whatever the mode read.

        The shape is ``[H, group, total]``: KV heads, and the query heads of each.
        """
        with torch.inference_mode():
            return inspect.weights(self._state, layer)

    def covered(self) -> Tensor:
        """Return the share of full attention that falls on the tokens read, ``[layers, H]``; 1 if all were read."""
        with torch.inference_mode():
            return torch.stack([inspect.covered(self._state, layer) for layer in range(self.model.layers)])

    def coverable(self) -> Tensor:
        """Return shares ``[3, layers, H]``: ``covered``, and those of as many tokens chosen by page, and one by one."""
        with torch.inference_mode():
            found = []
            for layer in range(self.model.layers):
                shares, mask = inspect.attention_shares(self._state, layer), self.attended(layer)
                read = mask.sum(-1)
                pages = inspect.covered_by_pages(shares, read, self._state.geometry.page)
                found.append(torch.stack(((shares * mask).sum(-1), pages, inspect.covered_by_tokens(shares, read))))
            return torch.stack(found, 1)


def tokens_read(session: Session) -> float:
    """Return how many stored tokens the last token read, averaged over layers and KV heads; waits for the device."""
    layers = range(session.info.layers)
    return statistics.fmean(session.attended(layer).float().sum(1).mean().item() for layer in layers)


def answered(session: Session, turns: Sequence[Turn], tokens: int) -> Finished:
    """Return the greedy answer to the last turn, of at most ``tokens`` tokens, with its figures."""
    *_, finished = session.answer(turns, Sampling(temperature=0, max_new_tokens=tokens))
    assert isinstance(finished, Finished)
    return finished


def decode(session: Session, given: Sequence[int], tokens: int) -> tuple[str, float]:
    """Decode the ids ``given``, at least one, then up to ``tokens`` more greedily, in the session's mode.

    Returns the answer without its end token, and how many tokens a step read on average.
    """
    answer, read = list[int](), list[float]()
    for token in given:
        logits = session.step(token)
        read.append(tokens_read(session))
    while len(answer) < tokens and (token := int(logits.argmax())) not in session.model.eos_ids:
        answer.append(token)
        logits = session.step(token)
        read.append(tokens_read(session))
    return str(session.model.tokenizer.decode(answer)), statistics.fmean(read)
