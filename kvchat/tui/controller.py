"""The chat without its screen: sends the user's requests to the engine and the engine's events to the view."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvchat.config import modes, presets, sources
from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import Summary
from kvchat.errors import EngineError, KvchatError, UsageError
from kvchat.models.catalog import short_name
from kvchat.paths import is_server
from kvchat.protocol.client import EngineClient, Report
from kvchat.protocol.figures import Params
from kvchat.protocol.messages import Forget, Peek, Rebuild, Switch
from kvchat.tui.answers import Answers, Waiting
from kvchat.tui.archive import Archive, ModeOfConversation
from kvchat.tui.branches import Branches, Pins
from kvchat.tui.comparisons import Comparisons
from kvchat.tui.events import EngineEvents
from kvchat.tui.models import Models
from kvchat.tui.prompt import arguments
from kvchat.tui.replay import DetailsWatch, Replay
from kvchat.tui.state import AppConfig, ChatState, Phase, no_engine
from kvchat.tui.view import ChatView

CHECKPOINT_S = 0.5  # however the application ends, an answer loses at most the text of twice this time
PEEK_TOKENS = 128  # more than a line holds


class ChatController:
    """Owns the state, the engine's client and the archive; ``view`` shows the changes.

    Its methods, and those of the objects it owns, raise ``UsageError`` to refuse; the caller shows it.
    """

    def __init__(self, config: AppConfig, client: EngineClient, view: ChatView) -> None:
        self.client = client
        self.view = view
        self._config, self._system = config, config.system
        self.state = ChatState(
            self._new_conversation(), config.sampling, config.load.mode, settings=config.load.mode_params
        )
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
        self._has_warned_of_loss = False
        self._is_log_problem_shown = False
        self._deleted: list[str] = []
        self._listed: tuple[int, str] | None = None
        self._background: set[asyncio.Task[None]] = set()

    # ---- the engine's process --------------------------------------------------------------------

    async def start(self) -> None:
        await self._start(self.client.start)

    async def restart(self) -> None:
        """Replace the engine by a fresh one in the same mode, which processes the conversation again.

        Do not wait for the old engine to end, which takes a second.
        """
        self.client.forget()
        await self.answers.abandon()
        self.comparisons.abandon("The engine was restarted.")
        self.state.forget_engine()
        self.view.show_snapshot(None)
        self.answers.show_phase(Phase.LOADING)
        self._run_in_background(self._start(self.client.restart))

    async def unload(self) -> None:
        """End the engine to free all its memory, without waiting for it; the next question starts it again."""
        self.branches.require_ready()
        self.client.forget()
        self.state.forget_engine()
        self.view.show_snapshot(None)
        self.view.add_note(
            "The model is being unloaded and the conversation is safe; the next question loads the model again."
        )
        self._run_in_background(self.client.close())
        await self.answers.down()

    async def listen(self) -> None:
        """Handle events until canceled, except those of an engine that is being replaced."""
        while True:
            reports, forgotten = await self.client.receive(), self.client.forgotten
            for report in reports:
                if self.client.forgotten == forgotten:
                    await self.handle(report)

    async def handle(self, report: Report) -> None:
        await self._events.handle(report)

    def may_leave(self) -> bool:
        """Return whether to quit; the first time that unsaved text would be lost, warn and return False."""
        problem = None if self._has_warned_of_loss else self.archive.problem
        if problem is None:
            return True
        self._has_warned_of_loss = True
        text = f"{problem} /export FILE writes this conversation elsewhere; /quit again leaves without it."
        self.view.toast(text, "Not saved", "error", 20)
        return False

    async def close(self) -> None:
        """Save the conversation and close the archive."""
        self.models.download.stop()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.answers.checkpoint()
        await self._save()
        await self.archive.close()

    # ---- what the user asks for ------------------------------------------------------------------

    async def ask(self, text: str) -> None:
        """Send a question, or queue it until the engine is ready; starts an engine that is down.

        Raises:
            UsageError: a recording is being replayed, or the text replaces another one while the engine is busy.
        """
        self.replay.refuse_question()
        if self.state.edits_answer:
            await self.branches.resume_edited(text)
            return
        pinned = await self.branches.leave_edited()
        phase, is_free = self.state.phase, self.answers.is_free
        if is_free:
            self.answers.mark_pending()
        question = await self.view.add_question(text, queued=not is_free)
        # The phase may have changed while the question was mounted.
        if self.answers.is_free:
            await self.answers.send(question, pinned)
            return
        if is_free:
            self.answers.is_asking = False
        self.answers.queue.add(Waiting(question, partial(self.answers.send, question, pinned)))
        if phase is Phase.DOWN:
            await self.restart()
        elif self.state.phase is Phase.DOWN:
            await self.answers.down()

    def has_to_wait(self, needs_model: bool, keeps_turn: bool) -> bool:
        """Return whether a command must wait for a model that is being loaded, or for queued questions."""
        is_loading = self.state.phase is Phase.LOADING
        return (needs_model and is_loading) or (keeps_turn and self.answers.queue.is_active)

    async def defer(self, line: str, run: Callable[[], Awaitable[None]]) -> None:
        """Queue a command; ``run`` executes it in its turn and shows its own errors."""
        if self.state.phase is not Phase.LOADING:
            self.view.toast(f"{line} is queued behind the questions; keys act at once.")
        command = await self.view.add_command(line)
        self.answers.defer(command, run)
        # The phase may have changed while the command was mounted.
        if self.state.phase is Phase.READY:
            await self.answers.ready()
        elif self.state.phase is Phase.DOWN:
            await self.answers.down()

    async def release_queue(self) -> None:
        self.answers.queue.release()
        if self.state.phase is Phase.READY:
            await self.answers.ready()
        elif self.state.phase is Phase.DOWN:
            await self.restart()

    async def take_back(self) -> None:
        """Return the question or command queued last to the prompt."""
        if not self.answers.queue:
            raise UsageError("Nothing is queued.", hint="Questions asked during an answer are queued.")
        if not self.view.restore_prompt(self.answers.queue.last):
            raise UsageError("The prompt holds another text.", hint="Send it or delete it first.")
        await self.answers.queue.take_back()

    def stop(self) -> None:
        """Stop the answer in progress, keeping its text, and hold the queue."""
        if self.state.phase.busy or self.answers.is_asking:
            self.answers.stop()
        else:
            self.answers.queue.hold()

    async def stop_work(self) -> None:
        """Stop the answer in progress, else the model that is being loaded or downloaded."""
        if self.state.phase.busy:
            self.stop()
        else:
            await self.models.stop()

    def rebuild(self) -> None:
        """Recompute the tokens that were computed with reduced context."""
        self.state.refuse_served()
        self.branches.require_ready()
        if not self.state.conversation.path:  # the engine still has the previous conversation
            raise UsageError("There is nothing to recompute yet.", hint="Ask something first.")
        self.answers.show_phase(Phase.PREFILL, "recomputing tokens …")
        self.client.send(Rebuild())

    def switch(self, mode: str, params: Params | None = None) -> None:
        """Switch to ``mode`` (empty: the current one) with ``params``, also during an answer."""
        self.state.refuse_served()
        target = mode or self.state.mode
        for one, given in modes.by_mode(target, params or {}).items():
            modes.parse(one, given)
        if self.state.phase is Phase.DOWN:
            raise no_engine()
        is_restarting = self.state.phase is Phase.LOADING and not self.client.alive
        if self.state.info is None or is_restarting:
            raise UsageError("The model is not loaded yet.", hint="Switch the mode as soon as it is ready.")
        asked = modes.together(target, self.state.take_later(target), params or {})
        if mode:
            self.state.wanted = mode
        for one, given in modes.by_mode(target, asked).items():
            modes.remember(self.state.pending, one, given)
        self.client.send(Switch(mode, asked))
        self.view.show_state(self.state)

    def switch_by(self, step: int) -> None:
        """Switch ``step`` modes onward from the last requested one."""
        wanted = self.state.wanted
        self.switch(modes.next_mode(self.state.mode if wanted in ("", modes.AUTO) else wanted, step))

    def set_parameter(self, name: str, value: int | float | bool | str) -> None:
        """Change a parameter of the current mode, or of auto, which then chooses again."""
        is_of_auto = self.state.asked == modes.AUTO and name in modes.AutoParameters.model_fields
        self.switch(modes.AUTO if is_of_auto else "", {name: value})

    def set_later(self, name: str, value: int | float | bool | str) -> None:
        """Keep a parameter for the next mode that has it; if auto may enter such a mode, it chooses again.

        Raises:
            UsageError: every mode that has the parameter refuses the value, or the model runs on a server.
        """
        self.state.refuse_served()
        if not modes.accepting(name, value):
            modes.parse(modes.having(name)[0], {name: value})
        self.state.later[name] = value
        if self._is_auto and any(name in modes.choosable()[one].model_fields for one in modes.ENTERED_BY_AUTO):
            self.switch(modes.AUTO)
            return
        self.view.add_note(f"The {self.state.mode} mode has no {name}; {value} applies in the next mode with one.")

    def set_for_mode(self, mode: str, name: str, value: int | float | bool | str | None) -> None:
        """Change a parameter of any mode, now or when the mode is entered; None lets kvchat choose."""
        modes.parse(mode, {name: value})
        if self._is_auto and mode in (modes.AUTO, *modes.ENTERED_BY_AUTO):
            self.switch(modes.AUTO, {name: value} if mode == modes.AUTO else {mode: {name: value}})
        elif mode == self.state.asked and self.state.info is not None:
            self.switch("", {name: value})
        else:
            self.state.awaiting.setdefault(mode, {})[name] = value

    @property
    def _is_auto(self) -> bool:
        """True if auto chooses, or will once the engine has answered."""
        return self.state.info is not None and (self.state.wanted or self.state.asked) == modes.AUTO

    def set_sampling(self, name: str, value: str) -> None:
        """Change a sampling parameter from the next answer on."""
        self.state.sampling = arguments.change(self.state.sampling, name, value)

    def set_system(self, text: str | None) -> None:
        """Change the system prompt from the next answer on; None removes it."""
        self.state.conversation.system = self._system = text

    def use_preset(self, file: Path) -> None:
        """Apply a preset: its mode at once, the rest from the next answer on.

        Raises:
            UsageError: its file is invalid, no model is loaded yet, or it sets a mode and the model runs on a server.
        """
        preset = sources.resolve(presets.read(file))
        given = {key: sources.at(preset.settings, key) for key in preset.origins}
        mode = given.get(presets.MODE, self.state.asked)
        params = {key[2]: value for key, value in given.items() if key[:2] == ("kv", mode)}
        has_mode = bool(params) or presets.MODE in given
        if has_mode and not self.state.is_served:
            self.switch(mode, params)
        for key, value in given.items():
            match key:
                case ("kv", other, parameter) if other != mode:
                    self.set_for_mode(other, parameter, value)
                case ("sampling", parameter):
                    self.state.sampling = replace(self.state.sampling, **{parameter: value})
                case presets.SYSTEM:
                    self.set_system(value or None)
        if has_mode:
            self.state.refuse_served()  # only now, so that the rest applies

    def save_preset(self, name: str) -> Path:
        """Save the system prompt, the sampling and the mode with its changed parameters; return the file.

        The mode is left out if the model runs on a server.
        """
        self.state.note_mode()
        mode, conversation = self.state.asked, self.state.conversation
        values: dict[sources.Key, Any] = {presets.SYSTEM: conversation.system or ""}
        values |= {("sampling", key): value for key, value in vars(self.state.sampling).items()}
        if not self.state.is_served:
            values[presets.MODE] = mode
            kept = modes.by_mode(mode, conversation.params)
            values |= {("kv", one, key): value for one, params in kept.items() for key, value in params.items()}
        return presets.save(name, values)

    def peek(self, start: int, end: int) -> None:
        """Request the text of the stored tokens ``start`` to ``end``, at most ``PEEK_TOKENS``."""
        if self.state.info is not None:
            self.client.send(Peek(start, min(end, start + PEEK_TOKENS)))

    # ---- the conversations on disk -------------------------------------------------------------------

    async def open_archive(self, resume: bool = False) -> Summary | None:
        """Open the database, and with ``resume`` the latest conversation; report a damaged one and leave it alone.

        Return the conversation that was the latest before.
        """
        if not await self.archive.open():
            return None
        try:
            latest = await self.archive.latest()
            if resume and latest is not None:
                await self.open(latest.id, is_first=True)
        except KvchatError as error:
            self.view.toast(str(error), title="Conversations", severity="warning", timeout=20)
            return None
        if resume and latest is None:
            self.view.toast("There is no earlier conversation to continue.", severity="warning")
        return latest

    async def keep(self) -> None:
        """Until canceled, save the conversation regularly and show the list of conversations when it changes."""
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            self.answers.checkpoint()
            await self._save()
            await self._list()

    async def new(self) -> None:
        """Save the current conversation, stop its answer and begin a new one."""
        await self._show_conversation(self._new_conversation())

    async def open(self, id: str, message: str = "", is_first: bool = False) -> None:
        """Open a conversation in its own mode, on the branch of ``message`` if given.

        In the first one opened (``is_first``) the mode and parameters of the command line override its own.
        """
        current = self.state.conversation
        if id == current.id and self.state.phase.busy:  # shown already, with an answer in progress
            if message and message not in (one.id for one in current.path):
                self.branches.require_ready()
            return
        await self._save()
        conversation = await self.archive.load(id)
        if message:
            conversation.select(message)
        asked = self._config
        if is_first and asked.asked_mode not in ("", conversation.mode):
            conversation.mode = ""
        elif is_first:
            entered = modes.ENTERED_BY_AUTO if conversation.mode == modes.AUTO else ()
            own = asked.asked_params.get(conversation.mode, {})
            others = {one: asked.asked_params[one] for one in entered if one in asked.asked_params}
            conversation.params = modes.together(conversation.mode, conversation.params, own, others)
        await self._show_conversation(conversation, continues=id == current.id)
        last = next((one.model for one in reversed(conversation.path) if one.model), "")
        now = self.models.in_use.model
        if last and not is_server(now) and last.partition(",")[0] != short_name(now):
            self.view.add_note(f"The last answer is by {last}; {short_name(now)} continues. /model loads another.")

    async def fork(self) -> None:
        """Open a copy of the conversation, up to the message chosen in the transcript if there is one."""
        end = self.view.chosen or (self.state.conversation.leaf.id if self.state.conversation.leaf else None)
        if end is None:
            raise UsageError("There is nothing to copy yet.", hint="Ask something first.")
        await self.take(self.state.conversation.fork(end), continues=True)
        self.view.toast("This is a copy; the original conversation is unchanged.")

    async def open_last(self) -> None:
        """Open the most recently changed conversation other than the current one."""
        await self._save()
        others = [one for one in await self.archive.search("") if one.id != self.state.conversation.id]
        if not others:
            raise UsageError("There is no earlier conversation.", hint="Ask something first.")
        await self.open(others[0].id)

    async def delete(self, id: str, title: str) -> None:
        """Delete a conversation; a new one replaces the current one."""
        if id == self.state.conversation.id:
            await self.new()
        await self.archive.delete(id)
        if self.state.info is not None:
            self.client.send(Forget(id))  # after its file was moved: the engine may have written another since
        self._deleted.append(id)
        self.view.toast(f"“{title}” was deleted; /restore brings it back within a day.", timeout=10)

    async def restore(self) -> None:
        """Restore the conversation deleted last and open it."""
        if not self._deleted:
            raise UsageError("Nothing was deleted in this run.", hint="/chats lists the saved conversations.")
        await self.archive.restore(self._deleted[-1])
        await self.open(self._deleted.pop())

    async def rename(self, title: str, id: str = "") -> None:
        """Rename the conversation ``id``; "" is the current one."""
        if id in ("", self.state.conversation.id):
            self.state.conversation.rename(title)
            await self._save()
        else:
            await self.archive.rename(id, title)

    async def take(self, conversation: Conversation, continues: bool = False) -> None:
        """Open a conversation that is not on disk yet, and save it."""
        conversation.is_kept = self._config.keeps_new
        await self._show_conversation(conversation, continues)
        await self._save()

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which waits for an engine to end, without blocking the screen."""
        self._background.add(task := asyncio.create_task(work))
        task.add_done_callback(self._background.discard)

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

    async def _show_conversation(self, conversation: Conversation, continues: bool = False) -> None:
        """Stop the answer, save the conversation and change to another."""
        self.stop()
        self.answers.detach()
        await self._save()
        self.state.exchange(conversation, continues)
        self.view.show_state(self.state)
        await self.view.show_messages(self.state.footed(), below=None)
        self.view.show_snapshot(self.state.snapshot)
        self.mode_of_conversation.restore(self.state.phase not in (Phase.LOADING, Phase.DOWN))
        self.answers.resume_kv()

    def _new_conversation(self) -> Conversation:
        conversation = Conversation(self._system)
        conversation.is_kept = self._config.keeps_new
        return conversation

    async def _save(self) -> None:
        if self.state.conversation.is_kept:
            await self.archive.save(self.state.conversation)

    async def _list(self) -> None:
        """Show the list of conversations if it or the current one has changed."""
        current = self.state.conversation.id
        if self.view.lists_conversations and self._listed != (self.archive.writes, current):
            self._listed = (self.archive.writes, current)
            with suppress(KvchatError):  # reported when the user asks for the list
                self.view.show_conversations(await self.archive.search(""), current)
