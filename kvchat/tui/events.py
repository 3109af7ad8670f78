"""What the engine reports: the state changes, the view shows it."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvchat.errors import EngineError, KvchatError, UsageError
from kvchat.protocol.comparing import Compared, Comparing
from kvchat.protocol.details import Details
from kvchat.protocol.figures import Planned, Snapshot
from kvchat.protocol.messages import (
    Failed,
    Finished,
    Loaded,
    Loading,
    NeedleHidden,
    Noted,
    Peeked,
    Prefilled,
    Preparing,
    Rebuilt,
    Recovered,
    Resumed,
    Started,
    Switched,
    SwitchRefused,
    Text,
    Withdrawn,
)
from kvchat.protocol.replaying import Asked, Replayed
from kvchat.tui.answering.answers import Answers
from kvchat.tui.client import Crashed, Report
from kvchat.tui.comparing.comparisons import Comparisons
from kvchat.tui.details import DetailsWatch
from kvchat.tui.model_choice.models import Models
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView
from kvchat.units import count, figure, seconds


class EngineEvents:
    """Handles every event of the protocol and the end of the engine; ``restart`` starts a fresh one."""

    def __init__(
        self,
        state: ChatState,
        answers: Answers,
        comparisons: Comparisons,
        models: Models,
        details: DetailsWatch,
        view: ChatView,
        restart: Callable[[], Awaitable[None]],
    ) -> None:
        self.state = state
        self.answers = answers
        self.comparisons = comparisons
        self.models = models
        self.details = details
        self.view = view
        self._restart = restart
        self._may_restart = True

    async def handle(self, report: Report) -> None:
        """Handle one event of the engine, or its end."""
        match report:
            case Snapshot():
                self._snapshot(report)
            case Details():
                self._details(report)
            case Text():
                self.answers.feed(report)
            case Loading(stage):
                self.state.enter_phase(Phase.LOADING, stage)
                self.view.show_state(self.state)
            case Loaded():
                await self._loaded(report)
            case Resumed():
                self._resumed(report)
            case Noted(text):
                self.view.add_note(text)
            case Started(prompt, reused):
                self.state.prompt_tokens, self.state.first_mode = prompt, self.state.mode
                self.answers.wait(f"reading {count(prompt - reused)} tokens, {count(reused)} kept …")
            case Prefilled(done, total):
                self.comparisons.note(report)
                self.answers.wait(f"reading {count(done)} of {count(total)} tokens …")
            case Preparing(mode):
                self.answers.wait(f"preparing the {mode} mode …")
                self.view.log_event(f"preparing the {mode} mode: compiling kernels, capturing its graph")
            case Recovered():
                self._recovered(report)
            case Withdrawn(chars):
                await self.answers.withdraw(chars)
            case Finished():
                self._may_restart = True
                await self.answers.finish(report)
                await self.answers.ready()
            case Switched():
                await self._switched(report)
            case SwitchRefused():
                self._switch_refused(report)
            case Rebuilt():
                await self._rebuilt(report)
            case Comparing():
                self.comparisons.note(report)
            case NeedleHidden():
                if not self.comparisons.ask_for(report):
                    await self.answers.ready()
            case Compared():
                self.comparisons.finish(report)
                await self.answers.ready()
            case Peeked(start, _, text):
                self.view.show_page_text(start, text)
            case Asked(text):
                await self.answers.ask(text)
            case Replayed(length):
                self.view.toast(f"The recording is over: {seconds(length)}. /restart plays it again.", timeout=10)
            case Planned():
                self.models.show_plan(report)
            case Failed():
                await self._failed(report)
            case Crashed():
                await self._crashed(report)

    def _snapshot(self, snapshot: Snapshot) -> None:
        if self.state.phase is Phase.COMPARING:
            return  # it is of another run than the conversation's
        self.state.snapshot = snapshot
        self.state.gpu_history.note(snapshot.gpu, self.state.details)
        self.state.update_params(snapshot)
        self.view.show_state(self.state)
        shown = snapshot if self.state.is_stored else replace(snapshot, active=0.0, total=0, ribbon="", attended="")
        self.view.show_snapshot(shown, self.state.phase is Phase.ANSWERING)

    def _details(self, details: Details) -> None:
        if self.state.phase is not Phase.COMPARING:
            self.state.details = details if self.state.is_stored else Details(0)
            self.view.show_details(self.state.details)

    async def _loaded(self, loaded: Loaded) -> None:
        self.state.info = loaded
        self.state.enter_mode(loaded.mode, loaded.params)
        self.details.renew()
        if self.models.take():
            self.view.log_event(f"{loaded.model} on {loaded.device}, context {count(loaded.context)}")
            for note in loaded.notes:
                self.view.add_note(note)
        if not self.answers.queue.has_questions:
            self.answers.take_up()
        await self.answers.ready()

    def _resumed(self, resumed: Resumed) -> None:
        if resumed.conversation == self.state.conversation.id:
            self.state.is_stored = True
            text = f"{count(resumed.tokens)} tokens came back from {resumed.where} in {seconds(resumed.seconds)}."
            self.view.add_note(text)
            self.view.log_event(text)

    def _recovered(self, recovered: Recovered) -> None:
        value = figure(recovered.value, digits=1)
        text = f"recovery {recovered.level} at {count(recovered.at)} tok: {recovered.signal} {value}"
        self.view.add_note(f"── {text} ──")
        self.view.log_event(text)

    async def _switched(self, switched: Switched) -> None:
        speed = self.state.snapshot.tokens_per_s if self.state.snapshot else None
        self.state.enter_mode(switched.mode, switched.params)
        self.state.accept(switched.mode, switched.params)
        self.view.show_state(self.state)
        self.view.log_event(f"{switched.before} -> {switched.mode} at {count(switched.total)} tok")
        await self.answers.add_switch(switched, speed)

    def _switch_refused(self, refused: SwitchRefused) -> None:
        self.state.pending.clear()
        self.state.mode = refused.mode  # `wanted` stays, so that the next F6 goes past the refused mode
        self._show_error(UsageError(f"The mode stays {refused.mode}.", refused.message, "/mode lists all modes."))

    async def _rebuilt(self, rebuilt: Rebuilt) -> None:
        left = f"; {count(rebuilt.reduced_tokens)} are left" if rebuilt.reduced_tokens else ""
        self.view.add_note(f"Recomputed {count(rebuilt.tokens)} tokens in {seconds(rebuilt.seconds)}{left}.")
        await self.answers.ready()

    async def _failed(self, failed: Failed) -> None:
        if self.state.phase.busy:
            await self.answers.abandon()
        self.comparisons.abandon(failed.title)
        is_kept = self.models.give_up(failed.fatal)
        self._show_error(EngineError(failed.title, failed.detail, failed.hint))
        if failed.fatal or self.state.info is None:
            await self.answers.down()
        elif not is_kept:
            await self.answers.ready()

    async def _crashed(self, crashed: Crashed) -> None:
        """Restart the engine once; a second crash without an answer in between leaves it down."""
        await self.answers.abandon()
        self.comparisons.abandon("The engine stopped.")
        again, self._may_restart = self._may_restart, False
        hint = "It is being restarted" if again else "/restart or the next question restarts it"
        title = f"The engine stopped: {describe_exit(crashed.code)}."
        self._show_error(EngineError(title, "\n".join(crashed.log), f"{hint}; the conversation is kept."))
        await (self._restart() if again else self.answers.down())

    def _show_error(self, error: KvchatError) -> None:
        self.view.add_error(error)
        self.view.log_event(error.title)


def describe_exit(code: int) -> str:
    """An exit code in words: ``exit code 3``, ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
