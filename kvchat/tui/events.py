"""Handles the engine's events, which change the state that the view shows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import assert_never

from kvchat import errors
from kvchat.config import modes
from kvchat.protocol import messages
from kvchat.protocol.client import Crashed, Report
from kvchat.protocol.figures import Planned, Snapshot
from kvchat.tui.answers import Answers
from kvchat.tui.archive import ModeOfConversation
from kvchat.tui.branches import Pins
from kvchat.tui.comparisons import Comparisons
from kvchat.tui.models import Models
from kvchat.tui.replay import DetailsWatch, Replay
from kvchat.tui.state import ENDINGS, ChatState, Phase, without_conversation
from kvchat.tui.view import ChatView, Remedy, context_full_remedy, remedies
from kvchat.units import count, figure, percent, seconds

CONTEXT_LEVELS = (1, 0.95, 0.8)  # shares of the context, the highest first


@dataclass(eq=False)
class EngineEvents:
    """Handles every event and the engine's end; ``restart`` starts a fresh engine."""

    state: ChatState
    answers: Answers
    pins: Pins
    comparisons: Comparisons
    models: Models
    details: DetailsWatch
    replay: Replay
    mode_of_conversation: ModeOfConversation
    view: ChatView
    restart: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self._may_restart = True
        self._reading_since = monotonic()
        self._warned = 0.0  # the last of CONTEXT_LEVELS with a warning

    async def handle(self, report: Report) -> None:
        match report:
            case Snapshot():
                self._snapshot(report)
            case messages.Details():
                if self.state.phase is not Phase.COMPARING:
                    self.state.details = report if self.state.is_stored else messages.Details(0)
                    self.view.show_details(self.state.details)
            case messages.Text():
                self.answers.feed(report)
            case messages.Loading(stage):
                self.answers.show_phase(Phase.LOADING, stage)
            case messages.Loaded():
                await self._loaded(report)
            case messages.Resumed(conversation, tokens, taken, where):
                if conversation == self.state.conversation.id:
                    self.state.is_stored = True
                    if where:
                        text = f"Restored {count(tokens, 'token')} from {where} in {seconds(taken)}."
                        self.view.add_note(text)
                        self.view.log_event(text)
            case messages.Noted(text):
                self.view.add_note(text)
            case messages.Started():
                self._started(report)
            case messages.Prefilled():
                self._prefilled(report)
            case messages.Preparing(mode):
                self.answers.wait(f"preparing the {mode} mode …")
                self.view.log_event(f"preparing the {mode} mode")
            case messages.Recovered(level, signal, value, at):
                self.view.log_event(f"recovery {level} at {count(at)} tok: {signal} {figure(value, digits=1)}")
            case messages.Withdrawn(chars):
                await self.answers.withdraw(chars)
            case messages.Finished():
                self._may_restart = True
                parts = (f"answered: {count(report.stats.generated_tokens)} tok", ENDINGS.get(report.reason, ""))
                self.view.log_event(", ".join(filter(None, parts)))
                await self.answers.finish(report)
                if self.state.phase.busy:  # else the user restarted the engine meanwhile
                    await self.answers.ready()
            case messages.Switched():
                await self._switched(report)
            case messages.SwitchRefused(mode, message):
                self.state.pending.clear()
                self.mode_of_conversation.is_due = False
                self.state.mode = mode  # `wanted` stays, so that the next F6 skips the refused mode
                self._show_error(errors.UsageError(f"The mode stays {mode}.", message, "/mode lists all modes."))
            case messages.Rebuilt(tokens, taken, reduced):
                left = f", {count(reduced)} left" if reduced else ""
                done = f"Recomputed {count(tokens, 'token')} in {seconds(taken)}{left}."
                self.view.add_note(done if tokens or reduced else "Nothing to recompute: all stored tokens are exact.")
                await self.answers.ready()
            case messages.Comparing():
                self.comparisons.note(report)
            case messages.NeedleHidden():
                if not self.comparisons.ask_for(report):
                    await self.answers.ready()
            case messages.Compared():
                self.comparisons.finish(report)
                await self.answers.ready()
            case messages.Peeked(start, _, text):
                self.view.show_page_text(start, text)
            case messages.Tokenized():
                pass  # only kvchat serve requests it
            case messages.Asked(text):
                await self.answers.ask(text)
            case messages.Replayed(taken):
                self.replay.is_over = True
                text = f"The recording has ended: {seconds(taken)}. /restart plays it again."
                self.view.toast(text, timeout=10)
            case Planned():
                self.models.show_plan(report)
            case messages.Failed(aside=True):
                self._show_failure(report)
            case messages.Failed():
                await self._failed(report)
            case Crashed():
                await self._crashed(report)
            case _:
                assert_never(report)

    def _snapshot(self, snapshot: Snapshot) -> None:
        if self.state.phase is Phase.COMPARING:
            return  # its figures are not the conversation's
        self.state.snapshot = snapshot if self.state.is_stored else without_conversation(snapshot)
        self.state.gpu_history.note(snapshot.gpu, self.state.details)
        if snapshot.mode == self.state.mode:  # kvchat adapts the parameters that it chose
            self.state.params, self.state.auto = snapshot.params, snapshot.auto
        if self.state.snapshot is not None and self.state.phase is not Phase.PREFILL:
            self._warn_of_context(self.state.snapshot.total)
        self.view.show_state(self.state)
        self.view.show_snapshot(self.state.snapshot, self.state.phase is Phase.ANSWERING)

    async def _loaded(self, loaded: messages.Loaded) -> None:
        self.state.info = loaded
        self.state.enter_mode(loaded.mode, loaded.params, loaded.auto)
        self.details.renew()
        if self.models.loaded():
            self.view.log_event(f"{self.state.model_name} on {loaded.device}, context {count(loaded.context)}")
            for note in loaded.notes:
                self.view.add_note(note)
        self.mode_of_conversation.restore(is_ready=True)
        if not self.answers.queue.has_questions:
            self.answers.resume_kv()
        await self.answers.ready()

    def _started(self, started: messages.Started) -> None:
        new, reused = started.prompt_tokens - started.reused_tokens, started.reused_tokens
        self.state.prompt_tokens, self.state.first_mode = started.prompt_tokens or None, self.state.mode
        text = (
            f"processing {count(new, 'new token')} ({count(reused)} cached)"
            if started.prompt_tokens
            else "waiting for the server"
        )
        self.answers.begun(started)
        self.answers.wait(f"{text} …")
        self.view.log_event(text)
        self._reading_since = monotonic()
        self._warn_of_context(started.prompt_tokens)

    def _prefilled(self, prefilled: messages.Prefilled) -> None:
        self.comparisons.note(prefilled)
        text = f"processing {count(prefilled.done)} of {count(prefilled.total, 'token')}"
        is_timed = self.answers.answer is not None and self.replay.is_real_time
        if prefilled.done and (taken := monotonic() - self._reading_since) > 0 and is_timed:
            rate = prefilled.done / taken
            left = (prefilled.total - prefilled.done) / rate
            text += f" · {figure(rate, 'tok/s')} · {seconds(left)} left"
        self.answers.wait(f"{text} …")

    def _warn_of_context(self, tokens: int) -> None:
        """Warn once for each of CONTEXT_LEVELS that ``tokens`` reach, and name the remedy."""
        if self.state.is_served and not tokens:
            return  # a server counts tokens only at the end of an answer
        context = self.state.info.context if self.state.info else 0
        ends = context and self.state.mode != modes.HOLDS_LEAST
        level = next((level for level in CONTEXT_LEVELS if ends and tokens >= level * context), 0.0)
        before, self._warned = self._warned, level
        if level > before:
            remedy = context_full_remedy(self.state)
            self.view.toast(
                f"{count(tokens)} of {count(context)} tokens: {percent(tokens / context)} of the model's context."
                f" {remedy.lines[0]} lets you {remedy.doc}.",
                title="The context is full" if level == 1 else "The context is nearly full",
                severity="warning",
                timeout=12,
            )

    async def _switched(self, switched: messages.Switched) -> None:
        speed = self.state.snapshot.tokens_per_s if self.state.snapshot else None
        if not self.state.is_stored:  # the bytes moved were another conversation's
            switched = replace(switched, total=0, moved_bytes=0, reduced_tokens=0)
        is_news = switched.auto not in ("", self.state.auto)
        self.state.enter_mode(switched.mode, switched.params, switched.auto)
        self.state.given = switched.given
        self.state.pending.clear()
        self.state.note_mode()
        self.view.show_state(self.state)
        self.view.log_event(f"{switched.before} → {switched.mode} at {count(switched.total)} tok")
        if not self.mode_of_conversation.report_switch():
            await self.answers.add_switch(switched, speed)
        if is_news:
            self.view.add_note(switched.auto)

    async def _failed(self, failed: messages.Failed) -> None:
        was_busy = self.state.phase.busy
        is_cut_off = was_busy and await self.answers.abandon()
        self.comparisons.abandon(failed.title)
        offered: tuple[Remedy, ...] = ()
        if failed.kind == errors.DoesNotFitError.__name__:
            offered = self.models.remedies()
        elif was_busy and failed.kind == errors.OutOfMemoryError.__name__:
            offered = remedies(self.state, is_cut_off)
        elif was_busy and failed.kind == errors.ContextFullError.__name__:
            offered = (context_full_remedy(self.state),)
        keeps_old = self.models.failed(failed.fatal)
        self._show_failure(failed, offered)
        if failed.fatal or self.state.info is None:
            await self.answers.down()
        elif not keeps_old:
            await self.answers.ready()

    def _show_failure(self, failed: messages.Failed, offered: Sequence[Remedy] = ()) -> None:
        self._show_error(errors.EngineError(failed.title, failed.detail, failed.hint), offered)
        if failed.kind == errors.TooMuchPinnedError.__name__:
            self.pins.take_back()

    async def _crashed(self, crashed: Crashed) -> None:
        """Restart the engine, unless it has crashed before and not finished an answer since."""
        was_busy = self.state.phase.busy
        is_cut_off = await self.answers.abandon()
        self.comparisons.abandon("The engine stopped.")
        again, self._may_restart = self._may_restart, False
        hint = "It is being restarted" if again else "/restart or the next question restarts it"
        title = f"The engine stopped: {crashed.how}."
        reason = ("Memory may have run out.",) if crashed.lacked_memory and was_busy else ()
        error = errors.EngineError(title, "\n".join((*crashed.log, *reason)), f"{hint}; the conversation is kept.")
        self._show_error(error, remedies(self.state, is_cut_off) if reason else ())
        await (self.restart() if again else self.answers.down())

    def _show_error(self, error: errors.KvchatError, remedies: Sequence[Remedy] = ()) -> None:
        self.view.add_error(error, remedies)
        self.view.log_event(error.title)
