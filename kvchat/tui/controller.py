"""The chat without its screen: what the user asks for goes to the engine, what the engine reports goes to the view."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from kvchat.config import modes
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import Summary
from kvchat.errors import EngineError, UsageError
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Command, Forget, Peek, Rebuild, Switch
from kvchat.tui import sampling
from kvchat.tui.answering.answers import Answers
from kvchat.tui.client import EngineClient, Report
from kvchat.tui.comparing.comparisons import Comparisons
from kvchat.tui.config import AppConfig
from kvchat.tui.events import EngineEvents
from kvchat.tui.kept.archive import Archive
from kvchat.tui.kept.branches import Branches
from kvchat.tui.model_choice.models import Models
from kvchat.tui.replay import Replay
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.view import ChatView

PEEK_TOKENS = 128  # more than a line holds
CHECKPOINT_S = 0.5  # at most twice that is lost of an answer, however the application ends


class ChatController:
    """Owns the state, the engine's client and the conversations on disk; ``view`` shows what changes."""

    def __init__(self, config: AppConfig, client: EngineClient, view: ChatView) -> None:
        self.client = client
        self.view = view
        self.state = ChatState(Conversation(config.system), config.sampling, config.load.mode)
        self.archive = Archive(config.database, view)
        self.replay = Replay(config.replay, client, view)
        self.answers = Answers(self.state, client, view, self._save, lambda: self.replay.is_real_time)
        self.branches = Branches(self.state, self.answers, view)
        self.comparisons = Comparisons(self.state, client, self.branches, view)
        self.models = Models(config, self.state, client, view, self.restart)
        self._events = EngineEvents(self.state, self.answers, self.comparisons, self.models, view, self.restart)
        self._system, self._is_log_problem_shown = config.system, False
        self._deleted: list[str] = []

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

    # ---- the conversations on disk ---------------------------------------------------------------

    async def open_archive(self, resume: bool = False) -> Summary | None:
        """Open the database, and with ``resume`` the latest conversation; the latest one before that."""
        await self.archive.open()
        latest = await self.archive.latest()
        if resume and latest is not None:
            await self.open(latest.id)
        elif resume:
            self.view.toast("There is no earlier conversation to go on with.", severity="warning")
        return latest

    async def keep(self) -> None:
        """Save what is said and answered until cancelled."""
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            self.answers.checkpoint()
            await self._save()

    async def close(self) -> None:
        """Save the conversation a last time; nothing is saved afterwards."""
        self.models.stop_download()
        self.answers.checkpoint()
        await self._save()
        await self.archive.close()

    async def new(self) -> None:
        """Begin a new conversation; a running answer is stopped, the present conversation is kept on disk."""
        await self._exchange(Conversation(self._system))

    async def open(self, id: str, message: str = "") -> None:
        """Go on with another conversation, on the branch of ``message`` if it is named.

        Raises:
            KvchatError: there is none with this id, or it cannot be read.
        """
        await self._save()
        conversation = await self.archive.load(id)
        if message:
            conversation.select(message)
        await self._exchange(conversation)

    async def fork(self) -> None:
        """Go on with a copy of the conversation up to the message chosen in the transcript, else of all of it.

        Raises:
            UsageError: nothing has been said yet.
        """
        end = self.view.chosen or (self.state.conversation.leaf.id if self.state.conversation.leaf else None)
        if end is None:
            raise UsageError("There is nothing to copy yet.", hint="Ask something first.")
        await self.take(self.state.conversation.fork(end))
        self.view.toast("This is a copy; the conversation it was copied from is as it was.")

    async def open_last(self) -> None:
        """Go on with the conversation written to last, besides the present one.

        Raises:
            UsageError: there is none.
        """
        await self._save()
        others = [one for one in await self.archive.search("") if one.id != self.state.conversation.id]
        if not others:
            raise UsageError("There is no earlier conversation.", hint="Ask something first.")
        await self.open(others[0].id)

    async def delete(self, id: str, title: str) -> None:
        """Delete a conversation; the present one gives way to a new one."""
        if id == self.state.conversation.id:
            await self.new()
        await self.archive.delete(id)
        if self.state.info is not None:
            self._send(Forget(id))  # after its file was set aside: what the engine wrote since is deleted
        self._deleted.append(id)
        self.view.toast(f"“{title}” is deleted; /restore brings it back within a day.", timeout=10)

    async def restore(self) -> None:
        """Bring the conversation deleted last back and go on with it.

        Raises:
            UsageError: none was deleted.
        """
        if not self._deleted:
            raise UsageError("Nothing has been deleted since the application was started.")
        await self.archive.restore(self._deleted[-1])
        await self.open(self._deleted.pop())

    async def rename(self, title: str) -> None:
        """Give the conversation another title."""
        self.state.conversation.rename(title)
        await self._save()

    async def take(self, conversation: Conversation) -> None:
        """Go on with a conversation that is not on disk yet."""
        await self._exchange(conversation)
        await self._save()

    # ---- what the user asks for ------------------------------------------------------------------

    async def ask(self, text: str) -> None:
        """Send a question, or queue it until the engine is ready; starts an engine that is down.

        Raises:
            UsageError: the text takes the place of an answer, and the engine is busy.
        """
        if self.state.edits_answer:
            await self.branches.resume_edited(text)
            return
        await self.branches.leave_edited()
        phase = self.state.phase
        if phase is Phase.READY:
            self.answers.expect()
        question = await self.view.add_question(text, queued=phase is not Phase.READY)
        # The phase may have changed while the question was mounted.
        if self.state.phase is Phase.READY:
            await self.answers.send(question)
            return
        self.answers.is_asking = False
        self.answers.queue.add(question)
        if phase is Phase.DOWN:
            await self.restart()
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
        """Take the question queued last back into the prompt.

        Raises:
            UsageError: none waits, or another text is in the prompt.
        """
        if not self.answers.queue:
            raise UsageError("No question is queued.", hint="What is asked during an answer waits for its end.")
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

    async def _start(self, starting: Awaitable[None]) -> None:
        try:
            await starting
        except EngineError as error:
            self.view.add_error(error)
            await self.answers.down()
            return
        if self.client.log_problem and not self._is_log_problem_shown:
            self._is_log_problem_shown = True
            self.view.toast(f"{self.client.log_problem} The engine's messages are dropped.", "Log", "warning", 10)
        self.replay.begin()
        self.models.load_in_use()

    async def _exchange(self, conversation: Conversation) -> None:
        """Stop the answer, save the conversation and show another."""
        self.stop()
        self.answers.leave()
        await self._save()
        self.state.exchange(conversation)
        self.view.show_state(self.state)
        await self.view.show_messages(self.state.footed(), below=None)
        self.answers.take_up()

    async def _save(self) -> None:
        await self.archive.save(self.state.conversation)

    def _send(self, command: Command) -> None:
        try:
            self.client.send(command)
        except UsageError as error:
            self.view.add_error(error)

    def _show_phase(self, phase: Phase, stage: str = "") -> None:
        self.state.enter_phase(phase, stage)
        self.view.show_state(self.state)
