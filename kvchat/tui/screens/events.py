"""What the engine says, routed to the state and to the widgets that show it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from textual.content import Content
from textual.css.query import NoMatches
from textual.widget import MountError

from kvchat.errors import EngineError, KvchatError, UsageError
from kvchat.protocol.messages import (
    Failed,
    Finished,
    Loaded,
    Loading,
    Peeked,
    Prefilled,
    Preparing,
    Rebuilt,
    Recovered,
    Snapshot,
    Started,
    Switched,
    SwitchRefused,
    Text,
    Withdrawn,
)
from kvchat.tui.client import Crashed, Report
from kvchat.tui.state import Phase
from kvchat.tui.widgets.bars import ModeBar, StatusBar
from kvchat.tui.widgets.messages import Answer, Question, SwitchNote
from kvchat.tui.widgets.panels import DetailColumn, KvColumn
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.timeline import Timeline
from kvchat.units import count, figure, seconds

if TYPE_CHECKING:
    from kvchat.tui.app import KvchatApp
    from kvchat.tui.screens.chat import ChatScreen


class EngineEvents:
    """Holds the answer under way; None between answers, and while one that nobody wants any more runs out."""

    def __init__(self, screen: ChatScreen) -> None:
        self.screen = screen
        self.state = screen.state
        self.answer: Answer | None = None
        self.question: Question | None = None
        self._notes: list[SwitchNote] = []
        self._may_restart = True

    async def listen(self) -> None:
        """Handle events as long as the application runs; while it closes, widgets vanish under a running handler."""
        app = self.screen.kvchat
        with closing(app):
            while app.is_running:
                for report in await app.client.receive():
                    await self.handle(report)

    async def handle(self, report: Report) -> None:
        """One event."""
        match report:
            case Snapshot():
                self._snapshot(report)
            case Text():
                self._text(report)
            case Loading(stage):
                self.screen.show_phase(Phase.LOADING, stage)
            case Loaded():
                await self._loaded(report)
            case Started(prompt, reused):
                self._wait(f"reading {count(prompt - reused)} tokens, {count(reused)} kept …")
            case Prefilled(done, total):
                self._wait(f"reading {count(done)} of {count(total)} tokens …")
            case Preparing(mode):
                self._wait(f"preparing the {mode} mode …")
                self._log(f"preparing the {mode} mode: compiling kernels, capturing its graph")
            case Recovered(level, signal, value, at):
                self._recovered(f"recovery {level} at {count(at)} tok: {signal} {figure(value, digits=1)}")
            case Withdrawn(chars):
                await self._withdrawn(chars)
            case Finished():
                await self._finished(report)
            case Switched():
                await self._switched(report)
            case SwitchRefused(mode, message):
                self.state.pending.clear()
                self.state.mode = mode  # what was wanted stays, so that the next F6 goes past it
                self._tell(UsageError(f"The mode stays {mode}.", message))
            case Rebuilt():
                await self._rebuilt(report)
            case Peeked(start, _, text):
                self.screen.query_one(Ribbon).show_text(start, text)
            case Failed():
                await self._failed(report)
            case Crashed():
                await self._crashed(report)

    # ---- answers ---------------------------------------------------------------------------------

    async def begin_answer(self, question: Question) -> None:
        """Ask a new question."""
        self.question = question
        self.state.conversation.ask(question.text)
        await self.begin_again()

    async def begin_again(self) -> None:
        """Ask for an answer to the last question."""
        self.state.first_mode = self.state.mode
        self.answer = await self.screen.transcript.add(Answer())
        self.screen.show_phase(Phase.PREFILL)
        try:
            self.screen.kvchat.client.send(self.state.conversation.command(self.state.sampling))
        except UsageError as error:
            await self.abandon()
            self._tell(error)
            await self._ready()

    async def abandon(self) -> None:
        """Close the answer under way: its text is kept, a question without any is given back to the prompt."""
        answer, self.answer = self.answer, None
        if answer is None:
            return
        if answer.text:
            self.state.conversation.answer(answer.text)
            await answer.finish(answer.text, "cut off", stopped=True)
        else:
            await answer.remove()
            await self._give_back()

    def forget(self) -> None:
        """The conversation is over; what still comes of its answer is dropped."""
        self.answer = self.question = self.screen.queued = None
        self._notes.clear()
        self.state.conversation.clear()
        self.state.stats.clear()
        self.screen.clear_instruments()

    async def _give_back(self) -> None:
        text = self.state.conversation.withdraw()
        self.screen.query_one(Prompt).restore(text)
        if self.question is not None:
            await self.question.remove()
            self.question = None

    def _wait(self, words: str) -> None:
        if self.answer is not None:
            self.answer.wait(words)

    def _text(self, piece: Text) -> None:
        if self.answer is None:
            return
        if self.state.phase is not Phase.ANSWERING:
            self.screen.show_phase(Phase.ANSWERING)
        self.answer.feed(piece.text)
        for note in self._notes:
            note.count(piece.tokens, monotonic())

    def _recovered(self, text: str) -> None:
        self.screen.say(f"── {text} ──")
        self._log(text)

    async def _withdrawn(self, chars: int) -> None:
        """Strike what the engine takes back: it stays readable, but is no part of the answer any more."""
        if self.answer is not None and chars:
            struck = await self.answer.withdraw(chars)
            self.screen.say(Content.assemble("withdrawn: ", (struck.strip(), "strike dim")))

    async def _finished(self, finished: Finished) -> None:
        answer, self.answer = self.answer, None
        self._close_notes()
        if answer is not None and (finished.text or finished.reason != "stopped"):
            self.state.conversation.answer(finished.text)
            self.state.stats.append(finished.stats)
            receipt = self.state.receipt(finished)
            await answer.finish(finished.text, receipt, stopped=finished.reason == "stopped")
            self._log(receipt)
        elif answer is not None:
            await answer.remove()
            await self._give_back()
            self.screen.toast("Stopped before the first word; the question is back in the prompt.")
        self._may_restart = True
        await self._ready()

    async def _ready(self) -> None:
        self.screen.show_phase(Phase.READY)
        question, self.screen.queued = self.screen.queued, None
        if question is not None:
            question.send()
            await self.begin_answer(question)

    # ---- the engine ------------------------------------------------------------------------------

    async def _loaded(self, loaded: Loaded) -> None:
        self.state.info = loaded
        self.screen.query_one(ModeBar).info = loaded
        self.screen.set_mode(loaded.mode, loaded.params)
        self._log(f"{loaded.model} on {loaded.device}, context {count(loaded.context)}")
        for note in loaded.notes:
            self.screen.say(note)
        await self._ready()

    def _snapshot(self, snapshot: Snapshot) -> None:
        screen = self.screen
        self.state.snapshot = snapshot
        bar = screen.query_one(ModeBar)
        bar.mode, bar.params = snapshot.mode, snapshot.params
        screen.query_one(Ribbon).snapshot = snapshot
        screen.query_one(StatusBar).add(snapshot, self.state.phase is Phase.ANSWERING)
        screen.query_one(KvColumn).show(snapshot)
        screen.query_one(DetailColumn).show(snapshot)

    async def _switched(self, switched: Switched) -> None:
        self._close_notes()
        speed = self.state.snapshot.tokens_per_s if self.state.snapshot else None
        self.screen.set_mode(switched.mode, switched.params)
        self.state.accept(switched.mode, switched.params)
        if switched.before != switched.mode:
            self.screen.query_one(Ribbon).mark(switched.total, switched.mode)
            self.screen.query_one(Timeline).mark()
        note = await self.screen.transcript.add(SwitchNote(switched, speed))
        self._notes = [*(old for old in self._notes if not old.settled), note]
        self._log(f"{switched.before} -> {switched.mode} at {count(switched.total)} tok")

    async def _rebuilt(self, rebuilt: Rebuilt) -> None:
        left = f"; {count(rebuilt.reduced_tokens)} are left" if rebuilt.reduced_tokens else ""
        self.screen.say(f"Computed {count(rebuilt.tokens)} tokens anew in {seconds(rebuilt.seconds)}{left}.")
        await self._ready()

    def _close_notes(self) -> None:
        for note in self._notes:
            note.close(monotonic())

    async def _failed(self, failed: Failed) -> None:
        if self.state.phase.busy:
            await self.abandon()
        self._tell(EngineError(failed.title, failed.detail, failed.hint))
        if failed.fatal or self.state.info is None:
            await self._down()
        else:
            await self._ready()

    async def _crashed(self, crashed: Crashed) -> None:
        await self.abandon()
        again = self._may_restart
        self._may_restart = False
        hint = "It is being restarted" if again else "/restart or the next question restarts it"
        title = f"The engine stopped: {ending(crashed.code)}."
        self._tell(EngineError(title, "\n".join(crashed.log), f"{hint}; the conversation is kept."))
        await (self.screen.restart() if again else self._down())

    async def _down(self) -> None:
        """Nothing is loaded: a question that waited for it is given back."""
        self.screen.show_phase(Phase.DOWN)
        question, self.screen.queued = self.screen.queued, None
        if question is not None:
            await question.remove()
            self.screen.query_one(Prompt).restore(question.text)

    def _tell(self, error: KvchatError) -> None:
        self.screen.show_error(error)
        self._log(error.title)

    def _log(self, text: str) -> None:
        self.screen.query_one(DetailColumn).log_event(text)


@contextmanager
def closing(app: KvchatApp) -> Iterator[None]:
    """Let nobody hear of widgets that are gone because the application is leaving."""
    try:
        yield
    except (NoMatches, MountError):
        if app.is_running:
            raise


def ending(code: int) -> str:
    """An exit code in words: ``exit code 3``, ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
