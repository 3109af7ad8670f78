"""Comparison: answers one question in several modes from the same K/V, then restores everything.

The prompt is prefilled once, exactly: tokens that an earlier answer computed with reduced context are prefilled again.
Each variant then goes back to the prompt's last token, reads it again and answers with the same random numbers, so that
variants differ only in what their decode steps read. A variant whose tokens differ from the first variant's is fed the
first one's tokens in a second pass, so that the two distributions can be compared at every token. Everything displaced
is checkpointed before and restored byte for byte, even if the comparison is stopped or fails.

Decision: recovery is off, because it would rewrite an answer depending on its own course, and drafts are off, because
each token must be one step of its mode. A variant that asks for either is refused; otherwise both settings are ignored.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvchat.config.modes import ModeParameters
from kvchat.engine.answer import AnswerLoop
from kvchat.engine.metrics import MetricsCollector
from kvchat.engine.mode_switcher import ModeSwitcher
from kvchat.engine.prompt import Stored
from kvchat.engine.runner import ModelRunner
from kvchat.engine.sampler import read
from kvchat.errors import DoesNotFitError, KvchatError, UsageError
from kvchat.kv.manager import Checkpoint, explained
from kvchat.protocol.figures import Agreement, Run, Stats
from kvchat.protocol.messages import Compared, Comparing, Event, Sampling, Started, Turn, Variant

PROGRESS_S = 1 / 10
OFF = {"recovery": False, "draft": "off"}
LOGITS_BYTES = 2**27  # of logits kept per run, in RAM: 4,096 tokens of the bundled model


@dataclass
class Answered:
    """The tokens of a run, the text of each, and the logits each was sampled from, as far as they are kept."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    reason: str = ""
    stats: Stats = field(default_factory=Stats)

    def keep(self, logits: Tensor) -> None:
        """Keep a copy of ``logits [vocab]`` in RAM, while there is room."""
        if len(self.logits) < LOGITS_BYTES // (4 * len(logits)):
            self.logits.append(logits.to("cpu", torch.float32, copy=True))


class Comparison:
    def __init__(
        self, loop: AnswerLoop, runner: ModelRunner, switcher: ModeSwitcher, metrics: MetricsCollector
    ) -> None:
        self._loop = loop
        self._runner = runner
        self._switcher = switcher
        self._metrics = metrics
        self._reported = 0.0
        self._pinned: Sequence[int] = ()

    def run(
        self, turns: Sequence[Turn], variants: Sequence[Variant], sampling: Sampling
    ) -> Generator[Event, None, None]:
        """Compare as ``Session.compare`` does, after ``announce``."""
        with explained(self._runner.kv, "comparing"):
            chosen = [self._token_by_token(variant) for variant in variants]
            loop = self._loop
            sampling = loop.ending(turns, sampling.seeded())
            loop.sampler(sampling)  # raises for invalid settings before anything changes
            prompt = loop.encoder.encode(turns, loop.stored)
            self._switcher.check_context(len(prompt.ids))
            exact, self._pinned = min(prompt.reused, loop.stored.first_reduced), loop.pinned(turns)
            with self._left_as_it_was(exact):
                loop.forget(exact)
                self._switcher.note_system_tokens(loop.encoder.system_tokens(turns))
                yield Started(len(prompt.ids), exact)
                unread = prompt.ids[exact:-1]
                logits = (yield from loop.read_prompt(unread)) if unread else None
                runs: list[Run] = []
                if logits is not None or not unread:
                    loop.pin_stored(self._pinned)
                    yield from self._answers(prompt.ids, chosen, sampling, runs)
            yield Compared(tuple(runs), len(prompt.ids))

    def _answers(
        self, prompt: list[int], chosen: list[ModeParameters], sampling: Sampling, runs: list[Run]
    ) -> Iterator[Event]:
        """Add a run for each variant, until canceled."""
        first: Answered | None = None
        for index, parameters in enumerate(chosen):
            if self._loop.is_canceled:
                return
            params = parameters.model_dump(exclude=set(OFF))
            try:
                logits = self._enter(prompt, parameters)
            except KvchatError as refused:
                runs.append(Run(parameters.name, params, refusal=str(refused)))
                continue
            answered = yield from self._answer(index, prompt, logits, sampling)
            agreement = None
            if first is not None:
                agreement = yield from self._agreement(index, prompt, parameters, first, answered)
            first = first or answered
            runs.append(
                Run(parameters.name, params, tuple(answered.pieces), answered.reason, answered.stats, agreement)
            )

    def _enter(self, prompt: list[int], parameters: ModeParameters) -> Tensor:
        """Go back to the prompt's end in a mode; return the first token's logits ``[vocab]``."""
        self._loop.forget(len(prompt) - 1)
        self._switcher.enter(parameters)
        logits = self._loop.prefill(prompt[-1:])
        self._runner.pin(self._pinned)  # now including the prompt's last token
        return logits

    def _answer(
        self, index: int, prompt: list[int], logits: Tensor, sampling: Sampling
    ) -> Generator[Event, None, Answered]:
        sampler, text = self._loop.sampler(sampling), self._loop.text_of(sampling, ())
        sampler.see(prompt)
        answered = Answered()
        measured = self._metrics.begin(len(prompt), len(prompt) - 1)
        while not (reason := self._loop.end_reason(text, len(answered.tokens), sampling)):
            answered.keep(logits)
            token = read(sampler(logits))
            measured.token()
            answered.tokens.append(token)
            if token in self._loop.ends:
                answered.pieces.append("")
                reason = "eos"
                break
            logits = self._loop.step(token)
            answered.pieces.append(text.add(token))
            yield from self._progress(Comparing(index, text.shown, len(answered.tokens)))
        answered.pieces.append(text.finish())
        answered.reason = reason
        # Every variant reads only the prompt's last token, so its prefill figures would mean nothing.
        answered.stats = replace(self._metrics.stats(measured), ttft_s=None, prefill_tokens_per_s=None)
        yield Comparing(index, text.shown, len(answered.tokens))
        return answered

    def _agreement(
        self, index: int, prompt: list[int], parameters: ModeParameters, first: Answered, answered: Answered
    ) -> Generator[Event, None, Agreement]:
        """Compare a run with the first one, fed the first one's text if the texts differ."""
        pairs = enumerate(zip(first.tokens, answered.tokens, strict=False))
        shorter = min(len(first.tokens), len(answered.tokens))
        alike = next((at for at, (one, other) in pairs if one != other), shorter)
        if alike == len(first.tokens) == len(answered.tokens):
            return compare_logits(None, first.logits, answered.logits)
        given = yield from self._given(index, prompt, parameters, first, answered)
        return compare_logits(alike, first.logits, given)

    def _given(
        self, index: int, prompt: list[int], parameters: ModeParameters, first: Answered, answered: Answered
    ) -> Generator[Event, None, list[Tensor]]:
        """Return a mode's logits for each of the first run's tokens, fed the tokens before; fewer if canceled."""
        given = Answered()
        given.keep(self._enter(prompt, parameters))
        text = "".join(answered.pieces)
        for token in first.tokens[: len(first.logits) - 1]:
            if self._loop.is_canceled or self._loop.is_full():
                break
            given.keep(self._loop.step(token))
            yield from self._progress(Comparing(index, text, len(answered.tokens), len(given.logits)))
        return given.logits

    def _progress(self, event: Comparing) -> Iterator[Event]:
        if time.monotonic() - self._reported >= PROGRESS_S:
            self._reported = time.monotonic()
            yield event

    def _token_by_token(self, variant: Variant) -> ModeParameters:
        for name, off in OFF.items():
            if variant.params.get(name, off) != off:
                raise UsageError(
                    f"A comparison does not take {name}.",
                    "Each of its tokens is one step of the mode, without drafts and recovery.",
                    f"Omit {name}. kvchat bench draft measures drafts.",
                )
        merged = self._switcher.merged(variant.mode, variant.params)
        return merged.model_copy(update={name: off for name, off in OFF.items() if name in type(merged).model_fields})

    @contextmanager
    def _left_as_it_was(self, start: int) -> Iterator[None]:
        """Restore the tokens from ``start`` on, their ids and the mode when the block ends."""
        loop, switcher = self._loop, self._switcher
        switcher.narrow()
        checkpoint, stored = self._runner.kv.checkpoint(start), copy.deepcopy(loop.stored)
        parameters, system_tokens = switcher.parameters, switcher.system_tokens
        with self._metrics.excluded():
            try:
                yield
            finally:
                loop.lock.check_process()
                try:
                    self._restore(checkpoint, stored)
                finally:
                    switcher.system_tokens = system_tokens
                    switcher.enter(parameters)

    def _restore(self, checkpoint: Checkpoint, stored: Stored) -> None:
        """Restore the stored tokens; if memory runs out, the next question prefills the missing ones again."""
        try:
            with explained(self._runner.kv, "restoring the conversation"):
                self._runner.restore(checkpoint, stored.ids[checkpoint.start :])
        except DoesNotFitError:
            kept = min(checkpoint.start, self._runner.kv.total)  # a truncated 8-bit page is dropped entirely
            self._loop.stored.truncate(kept)
            self._runner.truncate(kept)
            raise
        self._loop.stored.replace_with(stored)


def divergence(exact: Tensor, approximate: Tensor) -> float:
    """Return KL(exact || approximate) in nats of the distributions of two logit vectors ``[vocab]``, at least 0."""
    p, q = (logits.double().log_softmax(-1) for logits in (exact, approximate))
    chances = p.exp()
    return float((chances * (p - q))[chances > 0].sum().clamp(min=0))


def compare_logits(alike: int | None, first: Sequence[Tensor], other: Sequence[Tensor]) -> Agreement:
    """Compare logits ``[vocab]`` before the same tokens, except the first ones, which the prompt produced.

    ``alike`` is ``Agreement.first_difference``.
    """
    divergences, same = [], 0
    for one, another in list(zip(first, other, strict=False))[1:]:
        divergences.append(divergence(one, another))
        same += int(one.argmax() == another.argmax())
    tokens = len(divergences)
    if not tokens:
        return Agreement(alike)
    mean, largest = sum(divergences) / tokens, max(divergences)
    finite = largest < float("inf")  # infinite if only one of the two gives a token probability 0
    return Agreement(alike, tokens, same / tokens, mean if finite else None, largest if finite else None)
