"""AnswerLoop: prefills a prompt, then samples, stores and decodes tokens; the mode may change between two of them."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from kvchat import thoughts
from kvchat.config.schema import checked_sampling
from kvchat.engine.detokenizer import AnswerText
from kvchat.engine.metrics import RATE_TOKENS, AnswerMetrics, MetricsCollector
from kvchat.engine.mode_switcher import AHEAD, ModeSwitcher
from kvchat.engine.prompt import Prompt, PromptEncoder, Stored, common_prefix, is_text
from kvchat.engine.recovery import RecoveryMonitor, Trigger
from kvchat.engine.runner import ModelRunner
from kvchat.engine.sampler import Grammar, Sampler, Vocabulary, checked, grammar_of
from kvchat.errors import DoesNotFitError, KvchatError, UsageError
from kvchat.kv.manager import explained
from kvchat.kv.modes.base import Level
from kvchat.kv.modes.drafting import Drafter
from kvchat.kv.ops import cpu_ops
from kvchat.protocol.messages import (
    Event,
    Finished,
    Noted,
    Prefilled,
    Preparing,
    Rebuilt,
    Recovered,
    Sampling,
    Score,
    Started,
    Switched,
    Text,
    Turn,
    Withdrawn,
    parse_args,
)

T = TypeVar("T")
Between = Callable[[int], None]
MEMORY_TOKENS = 256  # generated tokens after which auto checks the memory again
LEAST_LOGPROB = -9999.0  # of an impossible token, because JSON has no infinity
LEAST_TIMED = 8  # rounds that an answer must have to show how long a token takes


class Released:
    """Raises ``UsageError`` when an attribute named in ``_held`` is used after ``_release`` deleted it."""

    _held: ClassVar[tuple[str, ...]] = ()

    def _release(self) -> None:
        """Delete the attributes; may be called again."""
        for name in self._held:
            self.__dict__.pop(name, None)

    if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelled attribute

        def __getattr__(self, name: str) -> Any:
            if name in self._held:
                raise _closed()
            raise AttributeError(f"{type(self).__name__} has no {name}")


class SessionLock:
    """Lets only one answer or rebuild use the stored tokens, and only in the process that loaded the model.

    Code that changes what is stored or read runs inside ``with``: only one thread may be inside, and it may enter
    again. Setting ``is_closed`` ends any work in progress.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._working = threading.Lock()
        self._inside = threading.RLock()
        self.is_closed = False

    def __enter__(self) -> None:
        """Keep other threads out until the block ends."""
        self.check_process()
        if not self._inside.acquire(blocking=False):
            raise _in_use()

    def __exit__(self, *_: object) -> None:
        self._inside.release()

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that loaded the model; both have the same files open."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse to work in a forked process: torch's threads do not exist there, so it would wait for them forever."""
        if self.is_forked:
            raise UsageError(
                "A session cannot be used in a forked process.",
                f"It was loaded by process {self._process}; this is process {os.getpid()}.",
                "Start the process with the method spawn, and load the model there.",
            )

    def check_idle(self) -> None:
        """Refuse to work while an answer is in progress."""
        with self:
            if self._working.locked():
                raise _busy()

    def in_turn(self, events: Generator[T, None, None]) -> Iterator[T]:
        """Yield the events of one piece of work until they end or are closed.

        Another thread may be inside only between two events.

        Raises:
            UsageError: other work is in progress, another thread is inside when the next event is requested, the
                session was closed, or this is a forked process. The events then end.
        """
        self.check_process()
        if not self._working.acquire(blocking=False):
            raise _busy()
        try:
            with self:
                event = next(events, None)
            try:
                while event is not None:
                    yield event
                    with self:
                        if self.is_closed:
                            raise _closed()
                        event = next(events, None)
            finally:
                # Closing the events waits for a thread that is inside; in a fork no such thread would ever leave.
                with nullcontext() if self.is_forked else self._inside:
                    events.close()
        finally:
            self._working.release()


class AnswerLoop(Released):
    """Answers conversations with one model; ``stored`` describes the tokens whose K/V are stored.

    ``token_ids`` are the ids generated by the last answer; they remain after ``close``.
    """

    _held = ("_runner", "_model", "_kv", "_switcher", "metrics")

    def __init__(
        self,
        runner: ModelRunner,
        switcher: ModeSwitcher,
        metrics: MetricsCollector,
        stored: Stored,
        template_args: Sequence[str] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.stored = stored
        self.encoder = PromptEncoder(runner.model.tokenizer, parse_args(template_args))
        self.template_args = tuple(template_args)
        self._runner = runner
        self._model = runner.model
        self._kv = runner.kv
        self._switcher = switcher
        self.metrics = metrics
        self._vocabulary: Vocabulary | None = None  # llguidance's, built when it is first needed
        self._canceled = threading.Event()
        self.lock = SessionLock()

    def set_template_args(self, args: Sequence[str]) -> None:
        """Render conversations with these variables of the chat template from now on.

        The stored tokens stay; the next prompt reuses the prefix that it shares with them.

        Raises:
            UsageError: an argument is not written as KEY=VALUE, or an answer is in progress.
        """
        self.lock.check_idle()
        self.encoder = PromptEncoder(self._model.tokenizer, parse_args(args))
        self.template_args = tuple(args)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer: those named in the model's files, and the one that the template writes."""
        return self._model.eos_ids | self.encoder.turn_end

    def close(self) -> None:
        """Release the model; an answer in progress ends."""
        self.lock.is_closed = True
        self._release()

    def announce(self) -> None:
        """Announce an answer or a rebuild, which ``cancel`` can end from now on.

        Raises:
            UsageError: another one is in progress.
        """
        self.lock.check_idle()
        self._canceled.clear()

    def cancel(self) -> None:
        """End the answer after the current token or prefill chunk; callable from any thread."""
        self._canceled.set()

    @property
    def is_canceled(self) -> bool:
        return self._canceled.is_set()

    # ---- one answer

    def answer(
        self,
        turns: Sequence[Turn],
        sampling: Sampling,
        between: Between,
        json_schema: str = "",
        top_logprobs: int | None = None,
        must_call: Sequence[str] = (),
    ) -> Iterator[Event]:
        """Answer as ``Session.answer`` does, after ``announce``."""
        with explained(self._kv, "answering"), self._all_noted():
            prompt, pinned = self.encoder.encode(turns, self.stored), self.pinned(turns)
            prompt = prompt._replace(reused=self._kv.state.reusable(prompt.reused))
            sampling = self.ending(turns, sampling)
            sampler = self.sampler(sampling)
            self._switcher.check_prompt(len(prompt.ids))
            grammar = None
            if json_schema or must_call:
                allowed = self.encoder.forced_call(must_call) if must_call else ""
                self._vocabulary = self._vocabulary or Vocabulary(self._model.tokenizer, self._model.vocab, self.ends)
                grammar = Grammar(self._vocabulary, allowed or grammar_of(json_schema))
            self.token_ids = []
            self._switcher.narrow()
            self.forget(prompt.reused)  # before the next calls, so that another conversation's pins do not count
            self._switcher.note_system_tokens(self.encoder.system_tokens(turns))
            end = len(prompt.ids) + min(sampling.max_new_tokens, AHEAD)
            yield from self._follow_auto(end)
            answer = self.metrics.begin(len(prompt.ids), prompt.reused)
            thought = self.encoder.thought_end(turns, prompt)
            yield Started(len(prompt.ids), prompt.reused, thought, self.encoder.thought_tags)
            logits = yield from self.read_prompt(prompt.ids[prompt.reused :], pinned)
            answer.prefilled = time.perf_counter()
            if logits is None:
                yield Finished("stopped", "", self.metrics.stats(answer))
                return
            self.stored.mark_text(prompt.text)
            if self._kv.mode.needs_calibration:
                yield Preparing(self._kv.mode.name)
            self._switcher.calibrate()
            if self._switcher.has_spilled:
                yield from self._follow_auto(end)
            self._runner.pin(pinned)
            sampler.see(prompt.ids)
            yield from self._generate(logits, prompt, sampler, answer, between, grammar, thought, top_logprobs)

    def _generate(
        self,
        logits: Tensor,
        prompt: Prompt,
        sampler: Sampler,
        answer: AnswerMetrics,
        between: Between,
        grammar: Grammar | None,
        thought: str,
        top_logprobs: int | None,
    ) -> Iterator[Event]:
        """Sample and store tokens; after the end of the ``thought`` they must match the ``grammar``."""
        sampling = sampler.sampling
        text = self.text_of(sampling, (), thoughts.goes_on(prompt.text), prompt.continues)
        monitor = RecoveryMonitor(sampler)
        prepared, checked_at, memory_checked_at = None, 0, 0
        scores: list[Score] = []  # of tokens whose text has not been emitted yet
        while not (reason := self.end_reason(text, len(self.token_ids), sampling, between)):
            if self._switcher.auto.is_on and len(self.token_ids) >= checked_at + RATE_TOKENS:
                checked_at = len(self.token_ids)
                is_due = checked_at >= memory_checked_at + MEMORY_TOKENS
                memory_checked_at = checked_at if is_due else memory_checked_at
                yield from self._follow_time(answer, is_due)
            if due := monitor.take():
                logits, text = yield from self._recover(monitor, due, logits, text, answer, grammar)
            held = grammar if thought in text.shown else None
            token = monitor.draw(held.masked(logits) if held else logits, self._kv.mode)
            if held:
                held.take(token)
            answer.recovery = monitor.level
            answer.token()
            self.token_ids.append(token)
            if token in self.ends:
                reason = "eos"
                break
            if top_logprobs is not None:
                scores.append(self._score(logits, token, top_logprobs))
            if self._runner.graphs.prepares and self._kv.mode is not prepared:
                prepared = self._kv.mode
                yield Preparing(prepared.name)
            # On a GPU this only launches the step, which runs while the text is decoded and emitted.
            most = min(sampling.max_new_tokens - len(self.token_ids), self._runner.rows - 1)
            accepted, logits = yield from self._advance(token, sampler, 0 if grammar or scores else most)
            shown = 0
            try:
                yield from self._shown(text, token, scores)
                for draft in accepted:
                    if text.stopped:
                        break
                    answer.token(is_draft=True)
                    self.token_ids.append(draft)
                    shown += 1
                    yield from self._shown(text, draft)
            finally:  # also if the generator is closed between two drafts
                if shown < len(accepted) and not (self.lock.is_closed or self.lock.is_forked):
                    self._forget_drafts(len(accepted), shown)
        if piece := text.finish():
            yield Text(piece, 0, tuple(scores))
        self.stored.mark_text(self.encoder.answered(prompt, text.decoded))
        self._switcher.note_speed(self._measured(answer, LEAST_TIMED))
        yield Finished(reason, text.shown, self.metrics.stats(answer))

    def _advance(self, token: int, sampler: Sampler, most: int) -> Generator[Event, None, tuple[Sequence[int], Tensor]]:
        """Store the sampled ``token`` and up to ``most`` drafts after it that the sampler also chooses.

        Returns the accepted drafts and the logits ``[vocab]`` after the last token. A round that fails is undone;
        drafts are then turned off and ``token`` is stored by a single step.
        """
        mode, drafter = self._kv.mode, self._kv.mode.drafter
        recovers = mode.parameters.recovery or self._runner.recurrent.exists
        if drafter and not drafter.failed and most > 0 and not recovers:
            total, before = self._kv.total, sampler.state()
            try:
                with explained(self._kv, "drafting"):
                    if verified := self._round(drafter, token, sampler, most):
                        return verified
            except KvchatError as error:
                drafter.failed = True
                with suppress(DoesNotFitError):  # the tokens are forgotten anyway, and the step fills the slots
                    self.forget(total)
                sampler.set_state(before)
                yield Noted(f"Drafts are off for this answer and later ones, until draft is set again: {error}")
        return [], self.step(token)

    def _round(self, drafter: Drafter, token: int, sampler: Sampler, most: int) -> tuple[Sequence[int], Tensor] | None:
        """Return ``_advance`` by one round of drafts, or None, with nothing stored, if ``drafter`` has no drafts."""
        if not (drafts := self._drafts(drafter, token, sampler, most)):
            return None
        logits = self._runner.verify([token, *drafts])
        self._store([token, *drafts])
        accepted = sampler.agrees(logits, drafts)
        self._forget_drafts(len(drafts), accepted)
        drafter.verified(drafts, accepted)
        self._kv.state.count_verified(1 + accepted)
        return drafts[:accepted], logits[accepted]

    def _drafts(self, drafter: Drafter, token: int, sampler: Sampler, most: int) -> list[int]:
        """Return the drafts after ``token``; guesses are sampled with the answer's own random numbers."""
        drafter.begin(self.stored.ids)
        has_guessed = False
        with ExitStack() as guessing:  # entered at the first guess, so that prompt lookup costs nothing

            def guess(last: int, tokens: int) -> list[int]:
                nonlocal has_guessed
                if not has_guessed:
                    has_guessed = True
                    guessing.callback(sampler.set_state, sampler.state())
                    guessing.enter_context(self._runner.guessing())
                return [checked(one) for one in self._runner.guess(last, tokens, sampler)]

            return drafter.draft(token, most, self.ends, guess)

    def _forget_drafts(self, drafts: int, kept: int) -> None:
        """Forget all but the first ``kept`` of the last ``drafts`` tokens, which one forward pass verified."""
        self._runner.end_at(kept)
        self.forget(self._kv.total - drafts + kept)

    @staticmethod
    def _shown(text: AnswerText, token: int, scores: list[Score] | None = None) -> Iterator[Event]:
        if piece := text.add(token):
            yield Text(piece, 1, tuple(scores or ()))
            if scores:
                scores.clear()

    def _score(self, logits: Tensor, token: int, most: int) -> Score:
        """Score a sampled token and the ``most`` likeliest tokens of ``logits [vocab]``."""
        logprobs = logits.float().log_softmax(0)
        values, ids = logprobs.topk(min(most, len(logprobs)))
        likeliest = zip(ids.tolist(), values.clamp(min=LEAST_LOGPROB).tolist(), strict=True)
        top = tuple((self.encoder.spelled(one), value) for one, value in likeliest)
        return Score(self.encoder.spelled(token), max(float(logprobs[token]), LEAST_LOGPROB), top)

    def end_reason(
        self, text: AnswerText, tokens: int, sampling: Sampling, between: Between = lambda tokens: None
    ) -> str:
        """Return why the answer ends after ``tokens`` tokens, or ""; the mode may change only here."""
        with self._runner.thread_budget:
            self.metrics.sample_coverage()
        between(tokens)
        if self._kv.total >= self._switcher.narrow_at:
            self._switcher.narrow()
        if self.is_canceled:
            return "stopped"
        if text.stopped:
            return "stop"
        if tokens >= sampling.max_new_tokens:
            return "length"
        return "context" if self.is_full() else ""

    def _recover(
        self,
        monitor: RecoveryMonitor,
        due: tuple[Level, Trigger],
        logits: Tensor,
        text: AnswerText,
        answer: AnswerMetrics,
        grammar: Grammar | None,
    ) -> Generator[Event, None, tuple[Tensor, AnswerText]]:
        """Carry out one recovery level; return the logits and the text to continue from."""
        level, trigger = due
        self._switcher.recover("FR" if level == "RR" else level)
        answer.recoveries += 1
        yield Recovered(level, trigger.signal, trigger.value, self._kv.total)
        if level != "RR":
            return logits, text
        tokens = monitor.rewind()
        if grammar:
            grammar.go_back(tokens)
        answer.withdrawn += tokens
        del self.token_ids[-tokens:]
        kept = self.text_of(monitor.sampler.sampling, self.token_ids, text.in_thought, text.continues)
        # The token before the first withdrawn one is prefilled again, because its logits are needed.
        last = self.stored.ids[-tokens - 1]
        self.forget(self._kv.total - tokens - 1)
        logits = self.prefill([last])
        yield Withdrawn(len(text.shown) - len(kept.shown), tokens)
        return logits, kept

    # ---- modes

    def switched(self, switch: Callable[[], int]) -> Switched:
        """Time a switch, which returns the bytes that it moved, and record it."""
        before, began = self._kv.mode.name, time.perf_counter()
        moved = switch()
        seconds, switcher = time.perf_counter() - began, self._switcher
        mode, params, given = self._kv.mode.name, self._kv.effective_params, copy.deepcopy(switcher.given)
        self.metrics.note_switch(before, mode, moved)
        reduced = self.stored.reduced_tokens
        return Switched(before, mode, params, self._kv.total, moved, seconds, reduced, given, switcher.auto.line)

    def _follow_auto(self, tokens: int, measured: float | None = None) -> Iterator[Event]:
        """Enter the mode that auto chooses for an answer that ends at ``tokens``; ``Switched`` or ``Noted`` says so."""
        if choice := self._switcher.decide(tokens, measured):
            before = self._switcher.parameters
            switched = self.switched(lambda: self._switcher.follow(choice, tokens, measured))
            yield switched if self._switcher.parameters != before else Noted(switched.auto)

    def _follow_time(self, answer: AnswerMetrics, is_due: bool) -> Iterator[Event]:
        """Let auto choose again during an answer if tokens take too long, or if its memory check ``is_due``."""
        measured = self._measured(answer, RATE_TOKENS)
        if measured and (is_due or self._switcher.auto.is_slow(measured)):
            self._switcher.note_speed(measured)
            yield from self._follow_auto(self._kv.total + MEMORY_TOKENS, measured)

    @staticmethod
    def _measured(answer: AnswerMetrics, least: int) -> float | None:
        """Return seconds per token; None while loops are being compiled, because it is slower without them."""
        is_compiling = any(not known.is_set() for known in cpu_ops.awaited.values())
        return None if is_compiling else answer.typical_s(least)

    # ---- pinned messages

    def pinned(self, turns: Sequence[Turn]) -> list[int]:
        """Return the positions of the tokens of pinned turns and of a pinned system prompt.

        Raises:
            UsageError: they leave too little of the model's context for the rest, or the template refuses.
        """
        found = self.encoder.pinned(turns, self.stored, self._switcher.parameters.pin_system)
        self._switcher.check_pinned(self._switcher.parameters, self.encoder.system_tokens(turns), found)
        return found

    def pin(self, turns: Sequence[Turn]) -> None:
        """From now on read a conversation's pinned turns, as far as they are stored, and its system prompt."""
        ids = self.encoder.ids_of(self.encoder.render(turns) if turns else "", self.stored)
        common = common_prefix(self.stored.ids, ids)
        self._runner.pin([position for position in self.pinned(turns) if position < common])
        self._switcher.narrow()
        with suppress(DoesNotFitError):  # the next question reports it
            self._switcher.note_system_tokens(self.encoder.system_tokens(turns))

    def pin_stored(self, positions: Sequence[int]) -> None:
        """Pin the ``positions`` that are stored."""
        self._runner.pin([position for position in positions if position < self._kv.total])

    def _pin_beyond_context(self, positions: Sequence[int]) -> None:
        if self._kv.mode.context_policy.limits_prompt(self._kv.total + 1):
            self.pin_stored(positions)

    # ---- tokens in and out of the KV manager

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Store ``ids`` exactly; return the next token's logits ``[vocab]``."""
        last = None
        for chunk, logits in self._runner.prefill(ids):
            self._store(chunk)
            last = logits
        assert last is not None
        return last

    def step(self, token: int) -> Tensor:
        """Store ``token``, reading what the mode chooses; return the next token's logits ``[vocab]``."""
        if self.is_full():
            self._switcher.check_context(self._kv.total + 1)
        logits = self._runner.step(token)
        self.stored.extend([token], reduced=not self._kv.step.exact)
        return logits

    def truncate(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` stored tokens.

        The last one is prefilled again, because modes use its query to choose what the next token reads. It counts as
        reduced if it did before.
        """
        if not 0 < tokens < self._kv.total:
            self.forget(tokens)
            return
        whole, pinned = copy.deepcopy(self.stored), self._kv.state.pins
        whole.truncate(tokens)
        self.forget(tokens - 1)
        self.prefill(whole.ids[-1:])
        self.pin_stored(pinned)
        self.stored.copy_text_of(whole)
        self.stored.reduced = whole.reduced

    def forget(self, tokens: int) -> None:
        """Forget all but the first ``tokens``, before the caller stores the next ones."""
        if tokens < self._kv.total:
            self.stored.truncate(tokens)  # first, so that the tokens are forgotten even if filling the slots fails
            self._runner.truncate(tokens)

    def rebuild(self) -> Iterator[Event]:
        """Rebuild as ``Session.rebuild`` does, after ``announce``."""
        with explained(self._kv, "rebuilding the K/V"):
            self._switcher.check_context(self._kv.total)
            first = min(self.stored.first_reduced, self._kv.state.first_quantized)
            whole, pinned, began = copy.deepcopy(self.stored), self._kv.state.pins, time.perf_counter()
            ids = whole.ids[first:]
            self.forget(first)
            if (yield from self.read_prompt(ids)) is not None:
                self.stored.copy_text_of(whole)
            self.pin_stored(pinned)
            yield Rebuilt(self._kv.total - first, time.perf_counter() - began, self.stored.reduced_tokens)

    def read_prompt(self, ids: Sequence[int], pinned: Sequence[int] = ()) -> Generator[Event, None, Tensor | None]:
        """Prefill and report progress; return the logits, or None if canceled. The tokens read stay stored.

        Beyond the context, where a prompt does not read everything, it reads ``pinned`` tokens once they are stored.
        """
        done, last = 0, None
        if self.is_canceled:
            return None
        self._pin_beyond_context(pinned)
        for chunk, logits in self._runner.prefill(ids):
            self._store(chunk)
            self._pin_beyond_context(pinned)
            done, last = done + len(chunk), logits
            yield Prefilled(done, len(ids))
            if self.is_canceled:
                break
        return last

    # ---- inside

    @contextmanager
    def _all_noted(self) -> Iterator[None]:
        """After a failure, forget the tokens that the KV manager stored and ``stored`` does not list yet."""
        try:
            yield
        except (Exception, KeyboardInterrupt):
            if len(self.stored.ids) < self._kv.total:
                self._runner.truncate(len(self.stored.ids))
            raise

    def _store(self, chunk: Sequence[int]) -> None:
        """Add a prompt chunk that the runner has prefilled to ``stored``."""
        self.stored.extend(chunk, reduced=self._kv.mode.context_policy.limits_prompt(self._kv.total))

    def ending(self, turns: Sequence[Turn], sampling: Sampling) -> Sampling:
        """Return ``sampling`` with the stop strings of the model and its template, unless the prompt is plain text.

        Raises:
            UsageError: a setting is out of range.
        """
        own = () if is_text(turns) else (*self._model.advised.stop, *self.encoder.stop)
        checked = checked_sampling(sampling)
        return replace(checked, stop=(*checked.stop, *own))

    def sampler(self, sampling: Sampling) -> Sampler:
        """Make the sampler of one answer; it may refuse ``sampling``."""
        return Sampler(sampling, self._model.vocab, self._model.device, self._model.advised)

    def text_of(
        self, sampling: Sampling, tokens: Sequence[int], in_thought: bool = False, continues: bool = False
    ) -> AnswerText:
        """Return the text of an answer that begins with ``tokens``, perhaps ``in_thought``, or ``continues`` one."""
        text = AnswerText(self._model.tokenizer, sampling.stop, in_thought, self.encoder.marks_of_calls, continues)
        for token in tokens:
            text.add(token)
        return text

    def is_full(self) -> bool:
        """True if the mode can store no more tokens."""
        return self._kv.mode.context_policy.is_final and self._kv.total >= self._model.context


def _closed() -> UsageError:
    return UsageError("The session is closed.", "Its model is no longer in memory.", "Load it again.")


def _in_use() -> UsageError:
    return UsageError(
        "Another thread is using the session.",
        "A session belongs to one thread at a time; only cancel may be called from any thread.",
        "Call it from one thread, or hold a lock while you do.",
    )


def _busy() -> UsageError:
    return UsageError(
        "An answer is in progress.",
        "A session does one thing at a time; between two tokens, only switch and cancel may be called.",
        "Read the answer to its end, or close its generator.",
    )
