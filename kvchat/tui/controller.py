"""The chat without its screen: what the user asks for goes to the engine, what the engine reports goes to the view."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kvchat.config import modes
from kvchat.errors import EngineError, UsageError
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Command, Peek, Rebuild, Switch
from kvchat.tui import sampling
from kvchat.tui.answering.answers import Answers
from kvchat.tui.client import EngineClient, Report
from kvchat.tui.comparing.comparisons import Comparisons
from kvchat.tui.config import AppConfig
from kvchat.tui.details import DetailsWatch
from kvchat.tui.events import EngineEvents
from kvchat.tui.kept.archive import Archive
from kvchat.tui.kept.branches import Branches
from kvchat.tui.kept.keeping import KeptConversations, ModeOfConversation
from kvchat.tui.model_choice.models import Models
from kvchat.tui.pins import Pins
from kvchat.tui.replay import Replay
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView

PEEK_TOKENS = 128  # more than a line holds


class ChatController(KeptConversations):
    """Owns the state, the engine's client and the conversations on disk; ``view`` shows what changes."""

    def __init__(self, config: AppConfig, client: EngineClient, view: ChatView) -> None:
        self.client = client
        self.view = view
        self._config, self._system = config, config.system
        self.state = ChatState(self._begun(), config.sampling, config.load.mode, settings=config.load.mode_params)
        self.archive = Archive(config.database, view)
        self.replay = Replay(config.replay, client, view)
        self.answers = Answers(self.state, client, view, self._save, lambda: self.replay.is_real_time)
        self.branches = Branches(self.state, self.answers, view)
        self.pins = Pins(self.state, self.answers, view)
        self.mode_of_conversation = ModeOfConversation(self.state, client, view)
        self.comparisons = Comparisons(self.state, client, self.branches, view)
        self.models = Models(config, self.state, client, view, self.restart)
        self.details = DetailsWatch(client, is_recorded=config.recorder is not None)
        self._events = EngineEvents(
            self.state,
            self.answers,
            self.pins,
            self.comparisons,
            self.models,
            self.details,
            self.replay,
            self.mode_of_conversation,
            view,
            self.restart,
        )
        self._is_log_problem_shown = False
        self._deleted: list[str] = []
        self._endings: set[asyncio.Task[None]] = set()

    # ---- the engine's process --------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and load the model."""
        await self._start(self.client.start)

    async def restart(self) -> None:
        """Replace the engine by a fresh one in the same mode; the conversation is kept and read again.

        Its end, which takes a second, is not waited for.
        """
        self.client.forget()
        await self.answers.abandon()
        self.comparisons.abandon("The engine was restarted.")
        self.state.forget_engine()
        self.view.show_snapshot(None)
        self._show_phase(Phase.LOADING)
        self._do_beside(self._start(self.client.restart))

    async def unload(self) -> None:
        """End the engine, which frees all its memory; the next question starts it again. Its end is not waited for.

        Raises:
            UsageError: the engine is busy or down.
        """
        self.branches.require_ready()
        self.client.forget()
        await self.answers.down()
        self._do_beside(self._end())

    async def _end(self) -> None:
        await self.client.close()
        self.state.forget_engine()
        self.view.show_snapshot(None)
        self.view.add_note("The model is unloaded, the conversation is kept; the next question loads the model again.")

    async def listen(self) -> None:
        """Handle the engine's events until canceled, of an engine that is being ended no more."""
        while True:
            reports, forgotten = await self.client.receive(), self.client.forgotten
            for report in reports:
                if self.client.forgotten == forgotten:
                    await self.handle(report)

    async def handle(self, report: Report) -> None:
        """Handle one event of the engine, or its end."""
        await self._events.handle(report)

    async def close(self) -> None:
        """Save the conversation a last time; nothing is saved afterwards."""
        self.models.stop_download()
        await asyncio.gather(*self._endings, return_exceptions=True)
        self.answers.checkpoint()
        await self._save()
        await self.archive.close()

    # ---- what the user asks for ------------------------------------------------------------------

    async def ask(self, text: str) -> None:
        """Send a question, or queue it until the engine is ready; starts an engine that is down.

        Raises:
            UsageError: a recording is replayed; or the text takes the place of another, and the engine is busy.
        """
        self.replay.refuse_question()
        if self.state.edits_answer:
            await self.branches.resume_edited(text)
            return
        pinned = await self.branches.leave_edited()
        phase, is_free = self.state.phase, self.answers.is_free
        if is_free:
            self.answers.expect()
        question = await self.view.add_question(text, queued=not is_free)
        # The phase may have changed while the question was mounted.
        if self.answers.is_free:
            await self.answers.send(question, pinned)
            return
        self.answers.is_asking = False
        self.answers.enqueue(question, pinned)
        if phase is Phase.DOWN:
            await self.restart()
        elif self.state.phase is Phase.DOWN:
            await self.answers.down()

    def has_to_wait(self, needs_model: bool, keeps_turn: bool) -> bool:
        """True if a command has to wait: for a model that is being loaded, or for its turn behind questions."""
        is_loading = self.state.phase is Phase.LOADING
        return (needs_model and is_loading) or (keeps_turn and self.answers.queue.goes_on)

    async def defer(self, line: str, run: Callable[[], Awaitable[None]]) -> None:
        """Queue a command; ``run`` does it when its turn comes, and tells by itself what is refused."""
        if self.state.phase is not Phase.LOADING:
            self.view.toast(f"{line} waits for its turn behind what is queued; keys act at once.")
        command = await self.view.add_command(line)
        self.answers.defer(command, run)
        # The phase may have changed while the command was mounted.
        if self.state.phase is Phase.READY:
            await self.answers.ready()
        elif self.state.phase is Phase.DOWN:
            await self.answers.down()

    async def release_queue(self) -> None:
        """Send the questions that are held."""
        self.answers.queue.release()
        if self.state.phase is Phase.READY:
            await self.answers.ready()
        elif self.state.phase is Phase.DOWN:
            await self.restart()

    async def take_back(self) -> None:
        """Take the question or command queued last back into the prompt.

        Raises:
            UsageError: none waits, or another text is in the prompt.
        """
        if not self.answers.queue:
            raise UsageError("Nothing is queued.", hint="What is asked during an answer waits for its end.")
        if not self.view.restore_prompt(self.answers.queue.last):
            raise UsageError("The prompt holds another text.", hint="Send it or delete it first.")
        await self.answers.queue.take_back()

    def stop(self) -> None:
        """Stop the answer in progress, whose text is kept; queued questions are held."""
        if self.state.phase.busy or self.answers.is_asking:
            self.answers.stop()
        else:
            self.answers.queue.hold()

    async def stop_work(self) -> None:
        """Stop the answer in progress; else what is being loaded or downloaded."""
        if self.state.phase.busy:
            self.stop()
        else:
            await self.models.stop()

    def rebuild(self) -> None:
        """Recompute exactly what was computed with less context.

        Raises:
            UsageError: the engine is busy or down.
        """
        self.branches.require_ready()
        self._show_phase(Phase.PREFILL)
        self._send(Rebuild())

    def switch(self, mode: str, params: Params | None = None) -> None:
        """Switch to ``mode`` (empty: the present one) with ``params``, also during an answer.

        Raises:
            UsageError: an unknown mode or parameter, a value out of range, or no model is loaded.
        """
        target = mode or self.state.mode
        modes.parse(target, params or {})
        is_restarting = self.state.phase is Phase.LOADING and not self.client.alive
        if self.state.info is None or is_restarting:
            raise UsageError("The model is not loaded yet.", hint="Switch the mode as soon as it is ready.")
        if self.state.phase is Phase.DOWN:
            raise UsageError("The engine is down.", hint="/restart or the next question starts it again.")
        asked = {**self.state.take_later(target), **(params or {})}
        self.state.wanted = target
        modes.remember(self.state.pending, target, asked)
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

    def set_later(self, name: str, value: int | float | bool | str) -> None:
        """Keep a parameter for the next mode that has it.

        Raises:
            UsageError: every mode that has it refuses the value.
        """
        if not modes.accepting(name, value):
            modes.parse(modes.having(name)[0], {name: value})
        self.state.later[name] = value
        self.view.add_note(f"The {self.state.mode} mode has no {name}; {value} counts from the next mode that has one.")

    def set_for_mode(self, mode: str, name: str, value: int | float | bool | str | None) -> None:
        """Change a parameter of any mode, at once or when the mode is entered; None leaves the choice to kvchat.

        Raises:
            UsageError: the mode has no such parameter, or the value is out of range.
        """
        modes.parse(mode, {name: value})
        if mode == self.state.mode and self.state.info is not None:
            self.switch("", {name: value})
        else:
            self.state.awaiting.setdefault(mode, {})[name] = value

    def set_sampling(self, name: str, value: str) -> None:
        """Change a sampling parameter from the next answer on.

        Raises:
            UsageError: an unknown name or a value out of range.
        """
        self.state.sampling = sampling.change(self.state.sampling, name, value)

    def set_system(self, text: str | None) -> None:
        """Change the system prompt from the next answer on; None removes it."""
        self.state.conversation.system = self._system = text

    def peek(self, start: int, end: int) -> None:
        """Ask for the text of the stored tokens ``start`` to ``end``."""
        if self.state.info is not None:
            self._send(Peek(start, min(end, start + PEEK_TOKENS)))

    # ---- helpers ---------------------------------------------------------------------------------

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what waits for the end of an engine, while the screen goes on."""
        self._endings.add(task := asyncio.create_task(work))
        task.add_done_callback(self._endings.discard)

    async def _start(self, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except EngineError as error:
            self.view.add_error(error)
            await self.answers.down()
            return
        if self.client.log_problem and not self._is_log_problem_shown:
            self._is_log_problem_shown = True
            self.view.toast(f"{self.client.log_problem} The engine's messages are dropped.", "Log", "warning", 10)
        self.replay.begin()
        self.models.load_in_use()

    def _send(self, command: Command) -> None:
        try:
            self.client.send(command)
        except UsageError as error:
            self.view.add_error(error)

    def _show_phase(self, phase: Phase, stage: str = "") -> None:
        self.state.enter_phase(phase, stage)
        self.view.show_state(self.state)
