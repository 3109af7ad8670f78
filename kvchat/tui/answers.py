"""The answer in progress and the question that waits for the engine."""

from __future__ import annotations

from time import monotonic

from kvchat.errors import UsageError
from kvchat.protocol.messages import Finished, Switched, Text
from kvchat.tui.client import EngineClient
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import AnswerView, ChatView, QuestionView, SwitchView


class Answers:
    """At most one answer in progress and one queued question.

    ``answer`` is None between answers, and after ``forget`` until the engine has finished the forgotten one.
    """

    def __init__(self, state: ChatState, client: EngineClient, view: ChatView) -> None:
        self.state = state
        self.client = client
        self.view = view
        self.answer: AnswerView | None = None
        self.queued: QuestionView | None = None
        self._question: QuestionView | None = None
        self._switches: list[SwitchView] = []

    async def begin(self, replace: bool = False) -> None:
        """Ask for an answer to the last question, in place of its present answer with ``replace``."""
        self.state.first_mode = self.state.mode
        self.answer = await self.view.add_answer(replace)
        self._show_phase(Phase.PREFILL)
        try:
            self.client.send(self.state.conversation.command(self.state.sampling))
        except UsageError as error:
            await self.abandon()
            self.view.add_error(error)
            await self.ready()

    def wait(self, words: str) -> None:
        """Show what the engine does before the first word."""
        if self.answer is not None:
            self.answer.wait(words)

    def feed(self, piece: Text) -> None:
        """Append decoded text; text of a forgotten answer is dropped."""
        if self.answer is None:
            return
        if self.state.phase is not Phase.ANSWERING:
            self._show_phase(Phase.ANSWERING)
        self.answer.feed(piece.text)
        for switch in self._switches:
            switch.count(piece.tokens, monotonic())

    async def withdraw(self, chars: int) -> None:
        """Remove the end of the answer and keep it readable, struck through, in a note."""
        if self.answer is not None and chars:
            struck = await self.answer.withdraw(chars)
            self.view.add_note("withdrawn: ", struck.strip())

    async def add_switch(self, switched: Switched, speed: float | None) -> None:
        """Add the line of a switch; it shows the speed after the switch once enough tokens have come."""
        self._close_switches()
        switch = await self.view.add_switch(switched, speed)
        self._switches = [*(old for old in self._switches if not old.settled), switch]

    async def finish(self, finished: Finished) -> None:
        """Complete the answer; one stopped before its first word gives the question back."""
        answer, self.answer = self.answer, None
        self._close_switches()
        if answer is None:
            return
        if finished.text or finished.reason != "stopped":
            await self._complete(answer, finished)
        else:
            await answer.remove()
            await self._give_back()
            self.view.toast("Stopped before the first word; the question is back in the prompt.")

    async def abandon(self) -> None:
        """Close the answer in progress: its text is kept, a question without any is given back to the prompt."""
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
        """Drop the answer in progress and the queued question: a new conversation."""
        self.answer = self.queued = self._question = None
        self._switches.clear()

    async def ready(self) -> None:
        """The engine is ready: send the queued question, if there is one."""
        self._show_phase(Phase.READY)
        question, self.queued = self.queued, None
        if question is not None:
            question.send()
            self._question = question
            self.state.conversation.ask(question.text)
            await self.begin()

    async def down(self) -> None:
        """No engine runs: give the queued question back to the prompt."""
        self._show_phase(Phase.DOWN)
        question, self.queued = self.queued, None
        if question is not None:
            await question.remove()
            self.view.restore_prompt(question.text)

    async def _complete(self, answer: AnswerView, finished: Finished) -> None:
        self.state.conversation.answer(finished.text)
        self.state.stats.append(finished.stats)
        receipt = self.state.receipt(finished)
        await answer.finish(finished.text, receipt, stopped=finished.reason == "stopped")
        self.view.log_event(receipt)

    async def _give_back(self) -> None:
        self.view.restore_prompt(self.state.conversation.withdraw())
        if self._question is not None:
            await self._question.remove()
            self._question = None

    def _close_switches(self) -> None:
        for switch in self._switches:
            switch.close(monotonic())

    def _show_phase(self, phase: Phase) -> None:
        self.state.enter_phase(phase)
        self.view.show_state(self.state)
