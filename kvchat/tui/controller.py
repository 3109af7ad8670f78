"""The chat without its screen: what the user asks for goes to the engine, what the engine reports goes to the view."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace

from kvchat.config import modes
from kvchat.errors import EngineError, UsageError
from kvchat.protocol.messages import Command, Params, Peek, Rebuild, Stop, Switch
from kvchat.tui import sampling
from kvchat.tui.answers import Answers
from kvchat.tui.client import EngineClient, Report
from kvchat.tui.config import AppConfig
from kvchat.tui.conversation import Conversation
from kvchat.tui.events import EngineEvents
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView

PEEK_TOKENS = 128  # more than a line holds


class ChatController:
    """Owns the state and the engine's client; ``view`` shows what changes."""

    def __init__(self, config: AppConfig, client: EngineClient, view: ChatView) -> None:
        self.load = config.load
        self.client = client
        self.view = view
        self.state = ChatState(Conversation(config.system), config.sampling, config.load.mode)
        self.answers = Answers(self.state, client, view)
        self._events = EngineEvents(self.state, self.answers, view, self.restart)
        self._is_log_problem_shown = False

    # ---- the engine's process --------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and load the model."""
        await self._start(self.client.start())

    async def restart(self) -> None:
        """Replace the engine by a fresh one in the same mode; the conversation is kept and read again."""
        await self.answers.abandon()
        self.view.show_snapshot(None)
        self._show_phase(Phase.LOADING)
        await self._start(self.client.restart())

    async def listen(self) -> None:
        """Handle the engine's events until cancelled."""
        while True:
            for report in await self.client.receive():
                await self.handle(report)

    async def handle(self, report: Report) -> None:
        """Handle one event of the engine, or its end."""
        await self._events.handle(report)

    # ---- what the user asks for ------------------------------------------------------------------

    async def ask(self, text: str) -> None:
        """Send a question, or queue it until the engine is ready; starts an engine that is down.

        Raises:
            UsageError: another question is queued.
        """
        if self.answers.queued is not None:
            raise UsageError(
                "One question is already waiting.",
                "It is sent as soon as the engine is ready.",
                "Send this one afterwards, or stop the answer first.",
            )
        phase = self.state.phase
        self.answers.queued = await self.view.add_question(text, queued=phase is not Phase.READY)
        # The phase may have changed while the question was mounted.
        if self.state.phase is Phase.READY:
            await self.answers.ready()
        elif phase is Phase.DOWN:
            await self.restart()
        elif self.state.phase is Phase.DOWN:
            await self.answers.down()

    def stop(self) -> None:
        """Stop the answer in progress; its text is kept."""
        if self.state.phase.busy:
            self._send(Stop())

    async def regenerate(self) -> None:
        """Answer the last question again, in place of its answer.

        Raises:
            UsageError: the engine is busy, or there is no question.
        """
        self._require_ready()
        if not self.state.conversation.reopen():
            raise UsageError("There is no question to answer again.", hint="Ask one first.")
        await self.answers.begin(replace=True)

    def rebuild(self) -> None:
        """Recompute exactly what was computed with less context.

        Raises:
            UsageError: the engine is busy or down.
        """
        self._require_ready()
        self._show_phase(Phase.PREFILL)
        self._send(Rebuild())

    async def new(self) -> None:
        """Begin a new conversation; a running answer is stopped."""
        self.stop()
        self.answers.forget()
        self.state.clear()
        await self.view.clear()

    def switch(self, mode: str, params: Params | None = None) -> None:
        """Switch to ``mode`` (empty: the present one) with ``params``, also during an answer.

        Raises:
            UsageError: an unknown mode or parameter, a value out of range, or no model is loaded.
        """
        target = mode or self.state.mode
        modes.parse(target, params or {})
        if self.state.info is None:
            raise UsageError("The model is not loaded yet.", hint="Switch the mode as soon as it is ready.")
        if self.state.phase is Phase.DOWN:
            raise UsageError("The engine is down.", hint="/restart or the next question starts it again.")
        asked = {**self.state.take_later(target), **(params or {})}
        self.state.wanted = target
        self.state.pending |= asked
        self._send(Switch(mode, asked))

    def switch_by(self, step: int) -> None:
        """Switch ``step`` modes onward from the one last asked for.

        Raises:
            UsageError: no model is loaded.
        """
        names = modes.mode_names()
        here = self.state.wanted or self.state.mode
        index = names.index(here) + step if here in names else 0
        self.switch(names[index % len(names)])

    def set_parameter(self, name: str, value: int | float | bool | str) -> None:
        """Change a parameter of the present mode.

        Raises:
            UsageError: the mode has no such parameter, or the value is out of range.
        """
        self.switch("", {name: value})

    def set_later(self, name: str, value: int) -> None:
        """Keep a parameter for the next mode that has it.

        Raises:
            UsageError: the value is out of range.
        """
        modes.parse("speculative", {name: value})
        self.state.later[name] = value
        self.view.add_note(f"The {self.state.mode} mode has no {name}; {value} counts from the next mode that has one.")

    def set_sampling(self, name: str, value: str) -> None:
        """Change a sampling parameter from the next answer on.

        Raises:
            UsageError: an unknown name or a value out of range.
        """
        self.state.sampling = sampling.change(self.state.sampling, name, value)

    def set_system(self, text: str | None) -> None:
        """Change the system prompt from the next answer on; None removes it."""
        self.state.conversation.system = text

    def peek(self, start: int, end: int) -> None:
        """Ask for the text of the stored tokens ``start`` to ``end``."""
        if self.state.info is not None:
            self._send(Peek(start, min(end, start + PEEK_TOKENS)))

    # ---- helpers ---------------------------------------------------------------------------------

    async def _start(self, starting: Awaitable[None]) -> None:
        try:
            await starting
        except EngineError as error:
            self.view.add_error(error)
            await self.answers.down()
            return
        if self.client.log_problem and not self._is_log_problem_shown:
            self._is_log_problem_shown = True
            text = f"{self.client.log_problem} The engine's messages are dropped."
            self.view.toast(text, title="Log", severity="warning", timeout=10)
        self._send(replace(self.load, mode=self.state.mode, given=self.state.given))

    def _require_ready(self) -> None:
        if self.state.phase is Phase.DOWN:
            raise UsageError("The engine is down.", hint="/restart or the next question starts it again.")
        if self.state.phase is not Phase.READY:
            raise UsageError("The engine is busy.", hint="/stop ends the answer; then try again.")

    def _send(self, command: Command) -> None:
        try:
            self.client.send(command)
        except UsageError as error:
            self.view.add_error(error)

    def _show_phase(self, phase: Phase, stage: str = "") -> None:
        self.state.enter_phase(phase, stage)
        self.view.show_state(self.state)
