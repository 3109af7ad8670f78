"""The chat screen: composes the widgets, passes user actions to the controller and shows what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import OptionList

from kvchat.conversations.conversation import Message
from kvchat.conversations.store import Summary
from kvchat.errors import KvchatError, UsageError
from kvchat.foreign_text import visible
from kvchat.protocol.client import EngineClient
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Details, Switched
from kvchat.tui import terminal
from kvchat.tui.actions import BY_ID, REPLAY, Action, Scope, bindings, is_command, parse_command
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt import arguments, external_editor
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.prompt.history import PromptHistory
from kvchat.tui.rebinding import describe_keys
from kvchat.tui.screens import compare
from kvchat.tui.screens.base import errors_as_toasts, open_once
from kvchat.tui.screens.choosing import ConversationsScreen, ModelsScreen
from kvchat.tui.screens.details import DetailsScreen
from kvchat.tui.state import AppConfig, ChatState, Footed, RunningComparison, SwitchLine
from kvchat.tui.view import Find, Remedy, Severity
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.bars import KeyHints, ModeBar, StatusBar, TooSmall
from kvchat.tui.widgets.base import run_worker
from kvchat.tui.widgets.composer import Composer, Prompt
from kvchat.tui.widgets.messages import Note, Problem, Question, SwitchNote
from kvchat.tui.widgets.panels import DetailColumn, EventLog, FigureColumn, KvColumn, Timeline
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.transcript import Gutter, Transcript, TranscriptPane, message_widgets
from kvchat.tui.widgets.welcome import ConversationColumn, Welcome, example
from kvchat.units import count

QUIT_WINDOW_S = 2.0
PARTS: dict[Scope, type[Widget]] = {
    "prompt": Prompt, "transcript": Transcript, "ribbon": Ribbon, "panels": KvColumn,
}  # fmt: skip
"""The parts of the screen, by the scope of the keys that act there."""
WITH_CONVERSATIONS = 190  # cells of width, which leave the transcript 82 next to all three columns


class ChatScreen(Screen[None]):
    """The ``ChatView`` of one controller; ``keys`` are the rebound keys by the id of their action."""

    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (Textual declares it)
        (0, "-tiny"),
        (40, "-narrow"),
        (100, "-wide"),
        (160, "-ultra"),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (12, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = bindings("chat")

    def __init__(self, config: AppConfig, client: EngineClient, keys: Mapping[str, str], themes: Sequence[str]) -> None:
        super().__init__()
        self.controller = ChatController(config, client, self)
        self._keys = keys
        self._themes = themes
        self._resume, self._first_question = config.resume, config.prompt.strip()
        self._history = PromptHistory(config.history_file)
        self._quit_armed = 0.0

    def compose(self) -> ComposeResult:
        yield ModeBar()
        with Horizontal(id="body"):
            yield ConversationColumn()
            yield TranscriptPane()
            hint = f"{self._key('panels')} shows all figures, {self._key('focus')} says what they mean."
            yield KvColumn(self.controller.models.in_use.link_bytes_per_s, hint)
            yield DetailColumn(self.controller.state)
        yield Ribbon()
        yield StatusBar()
        yield Composer(self._history, self._surroundings, self._key)
        yield KeyHints()
        yield TooSmall(id="too-small")

    async def on_mount(self) -> None:
        self.query_one(ModeBar).is_recording = bool(self.controller.replay.name)
        self.show_state(self.controller.state)
        await self._transcript.add(self._welcome())
        if self._first_question:  # an empty one would erase what the user has already typed
            self.query_one(Prompt).replace_all(self._first_question)
            self._first_question = self.query_one(Prompt).text  # as it is shown: a long one is folded
        run_worker(self, self.controller.listen)
        run_worker(self, self._open_archive)
        self.call_after_refresh(self.controller.start)

    def on_resize(self, event: events.Resize) -> None:
        """Show the column of conversations if the transcript stays wide enough."""
        self.set_class(event.size.width >= WITH_CONVERSATIONS, "with-conversations")

    # ---- user actions ----------------------------------------------------------------------------

    async def on_prompt_sent(self, message: Prompt.Sent) -> None:
        """Run a command or ask a question; a refused question returns to the prompt.

        A refused command does not: text typed meanwhile is the next question, and would become part of the command.
        """
        prompt = self.query_one(Prompt)
        if message.is_command:
            await self.run_command(message.text.strip())
        elif not await self._ask(message):
            prompt.give_back(message)
            return
        prompt.remember(message)

    async def _ask(self, message: Prompt.Sent) -> bool:
        text = message.text
        try:
            if asked := self._example(text):
                await self._run_example(asked)
            elif text.strip():
                await self.controller.ask(arguments.compose(message.parts, self.controller.state))
            elif self.controller.answers.queue.is_held:
                await self.controller.release_queue()
            else:
                self.controller.replay.refuse_question()
                self.toast("There is nothing to send yet: type a question first.", severity="warning")
        except KvchatError as refused:
            self.toast(str(refused), severity="warning")
            return False
        return True

    def _example(self, typed: str) -> str | None:
        """Return the example on the first screen that was chosen by typing its number; None if there is none."""
        if not self.query(Welcome) or self.controller.replay.name:
            return None
        return example(typed, self.controller.models.in_use.model)

    async def _run_example(self, asked: str) -> None:
        if is_command(asked):
            await self.run_command(asked)
        else:
            await self.controller.ask(asked)

    async def on_prompt_took_back(self) -> None:
        """Move the last queued question to the prompt, unless another text has been begun there."""
        with errors_as_toasts(self.app):
            await self.controller.take_back()

    async def run_command(self, line: str, is_its_turn: bool = False) -> None:
        """Run a slash command, queued behind waiting questions unless ``is_its_turn``.

        A usage error is shown as a toast, another error in the transcript.
        """
        try:
            await self._run(*parse_command(line), is_typed=not is_its_turn)
        except UsageError as error:
            self.toast(str(error), severity="warning", timeout=8)
        except KvchatError as error:
            self.add_error(error)

    def begin_command(self, line: str) -> None:
        self.query_one(Prompt).begin(line)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable the keys of a replay, and their hints, only during one."""
        is_of_replay = action == "run" and str(parameters[0]).startswith(REPLAY)
        return bool(self.controller.replay.name) if is_of_replay else super().check_action(action, parameters)

    async def action_run(self, id: str) -> None:
        """Run an action of the table of actions; one that needs an argument begins its command in the prompt."""
        if BY_ID[id].needs_argument:
            self.begin_command(f"/{BY_ID[id].command} ")
            return
        with errors_as_toasts(self.app):
            await self._run(BY_ID[id], "")

    async def run_from_palette(self, id: str) -> None:
        """Run an action that has a key but no command, in the part of the screen where that key acts."""
        action = BY_ID[id]
        if action.run:
            await self.action_run(id)
        elif action.scope in PARTS:
            part = self.query_one(PARTS[action.scope])
            part.focus()
            await part.run_action(action.action)
        else:
            await self.run_action(action.action)

    async def action_run_lines(self, lines: Sequence[str]) -> None:
        """Run slash commands in turn, as if they were typed."""
        self.query_one(Prompt).focus()
        for line in lines:
            await self.run_command(line)

    async def action_stop(self) -> None:
        """Stop the answer, the loading of a model or the editing of a message, and focus the prompt."""
        await self.controller.stop_work()
        prompt = self.query_one(Prompt)
        if self.controller.state.edited is not None:
            self.controller.branches.stop_editing()
            prompt.clear_to_history()
        prompt.focus()

    async def action_ask_example(self, typed: str) -> None:
        with errors_as_toasts(self.app):
            if asked := self._example(typed):
                await self._run_example(asked)

    def action_editor(self) -> None:
        run_worker(self, self._edit_outside, group="editor", exclusive=True)

    def action_details(self) -> None:
        """Open the details; they repeat the events unless the detail column shows them."""
        events = None if self.query_one(DetailColumn).display else self.query_one(EventLog)
        open_once(self.app, DetailsScreen(self.controller, events))

    @on(FigureColumn.Changed)
    def watch_details(self) -> None:
        """Request details while the detail column is visible; with a server, while any column of figures is."""
        details = self.query_one(DetailColumn).is_on_screen
        details |= self.controller.state.is_served and self.query_one(KvColumn).is_on_screen
        (self.controller.details.begin if details else self.controller.details.end)("column")

    def action_conversations(self, text: str = "") -> None:
        """List the saved conversations that contain ``text``."""
        open_once(self.app, ConversationsScreen(self.controller, text))

    @on(OptionList.OptionSelected, "ConversationColumn")
    async def open_chosen(self, event: OptionList.OptionSelected) -> None:
        if event.option.id and event.option.id != self.controller.state.conversation.id:
            with errors_as_toasts(self.app):
                await self.controller.open(event.option.id)

    def on_key(self, event: events.Key) -> None:
        """Move the focus to the prompt when the user types elsewhere."""
        prompt = self.query_one(Prompt)
        if event.is_printable and event.character and event.key not in self.active_bindings and not prompt.has_focus:
            event.stop()
            prompt.focus()
            prompt.insert(event.character)

    async def action_interrupt(self) -> None:
        """Copy the selection; else stop the answer; else quit if pressed twice."""
        selected = self.query_one(Prompt).selected_text or self.get_selected_text()
        if selected:
            self.copy(selected)
        elif self.controller.state.phase.busy:
            self.controller.stop()
        elif monotonic() - self._quit_armed < QUIT_WINDOW_S:
            await self.app.action_quit()
        else:
            self._quit_armed = monotonic()
            self.toast(f"Press {self._key('interrupt')} again to quit.", timeout=QUIT_WINDOW_S)

    def action_panels(self) -> None:
        """Cycle from the four plain figures to all figures, to no panels, and back."""
        shown, is_all = bool(self.query_one(KvColumn).display), self.has_class("figures-all")
        is_off = shown and is_all
        classes = {"figures-all": shown and not is_all, "panels-on": not is_off, "panels-off": is_off}
        self.update_classes(classes, update=False)
        for column in self.query("KvColumn, DetailColumn, ConversationColumn"):  # not every message
            column.update_node_styles()

    def action_thinking(self) -> None:
        self.toggle_class("thoughts-on")

    def action_newest(self) -> None:
        self._transcript.jump_to_end()

    def action_page(self, direction: str) -> None:
        """Scroll the transcript ``up`` or ``down`` by a page, wherever the focus is."""
        getattr(self._transcript, f"scroll_page_{direction}")(animate=False)

    def on_ribbon_cursor_moved(self, message: Ribbon.CursorMoved) -> None:
        self.controller.peek(message.start, message.end)

    async def on_ribbon_picked(self, message: Ribbon.Picked) -> None:
        id = self.controller.state.message_at(message.position)
        if id is None or not await self._transcript.go_to(id):
            self.toast(f"Token {count(message.position)} belongs to no message shown here.")

    # ---- ``ChatView``: the controller calls these --------------------------------------------------

    @property
    def chosen(self) -> str | None:
        return self._transcript.chosen

    @property
    def lists_conversations(self) -> bool:
        return bool(self.query_one(ConversationColumn).display)

    async def show_messages(self, messages: Sequence[Footed], below: str | None) -> None:
        if below is None:
            self.query_one(Ribbon).clear()
            self.query_one(Timeline).clear()
        self._show_switches()
        is_queued = len(self.controller.answers.queue) > 0
        # Without the examples, because Enter then sends the queued questions and not the first example.
        shown = message_widgets(messages) or ([] if below or is_queued else [self._welcome()])
        await self._transcript.replace_below(below, shown, keeps_queued=is_queued)

    def show_footer(self, message: Message, footer: str) -> None:
        self._transcript.show_footer(message.id, footer)

    async def add_question(self, text: str, queued: bool) -> Question:
        await self._transcript.query(Welcome).remove()
        return await self._transcript.add(Question(text, queued))

    async def add_command(self, line: str) -> Question:
        return await self._transcript.add(Question(line, queued=True))

    async def add_answer(self) -> Answer:
        return await self._transcript.add(Answer())

    async def add_switch(self, switched: Switched, speed: float | None) -> SwitchLine:
        answer = next((answer for answer in self._transcript.query(Answer) if not answer.finished), None)
        if answer is not None:
            return answer.mark(switched, speed)
        return await self._transcript.add(SwitchNote(switched, speed))

    def add_way_back(self, switched: Switched) -> None:
        """Do nothing: the line of the reverted switch has been removed."""

    def add_note(self, text: str, struck: str = "") -> None:
        self._add(Note(Content.assemble(visible(text), (visible(struck), "strike dim"))))

    def add_error(self, error: KvchatError, remedies: Sequence[Remedy] = ()) -> None:
        self._add(Problem(error, remedies))

    def toast(self, text: str, title: str = "", severity: Severity = "information", timeout: float = 5.0) -> None:
        self.app.notify(text, title=title, severity=severity, timeout=timeout)

    def log_event(self, text: str) -> None:
        self.query_one(EventLog).add(visible(text))
        self.show_details()

    def show_state(self, state: ChatState) -> None:
        bar = self.query_one(ModeBar)
        if bar.info is not state.info:
            for welcome in self.query(Welcome):
                welcome.suit(self.controller.models.in_use.model)
        bar.info, bar.phase, bar.download = state.info, state.phase, state.download
        self.query_one(StatusBar).stage = state.stage
        bar.mode, bar.params = f"auto: {state.mode}" if state.auto else state.mode, state.params
        bar.coming = state.coming_mode
        self.query_one(Composer).show_editing(state.edited is not None, state.edits_answer)
        if self.has_class("served") != state.is_served:
            self.set_class(state.is_served, "served")
            self.watch_details()

    def show_queue(self, waiting: int, is_held: bool) -> None:
        self.query_one(Composer).show_queue(waiting, is_held)

    def show_snapshot(self, snapshot: Snapshot | None, answering: bool = False) -> None:
        self.query_one(Gutter).show(self.controller.state.marks(snapshot) if snapshot else None)
        if snapshot is None:
            self.query_one(Ribbon).clear()
            self.query_one(StatusBar).clear()
            self.query_one(KvColumn).clear()
        else:
            self._show_switches()
            self.query_one(Ribbon).snapshot = snapshot
            self.query_one(StatusBar).add(snapshot, answering)
            self.query_one(KvColumn).show(snapshot)
        self.show_details()

    def show_details(self, details: Details | None = None) -> None:
        self.query_one(DetailColumn).show()
        if isinstance(self.app.screen, DetailsScreen):
            self.app.screen.show()

    def show_page_text(self, start: int, text: str) -> None:
        self.query_one(Ribbon).show_text(start, text)

    def show_comparison(self, shown: RunningComparison) -> None:
        compare.show(self.app, self.controller.comparisons, shown)

    def show_conversations(self, kept: Sequence[Summary], current: str) -> None:
        self.query_one(ConversationColumn).show(kept, current)

    async def show_models(self, find: Find) -> None:
        open_once(self.app, ModelsScreen(self.controller, find))

    def restore_prompt(self, text: str) -> bool:
        prompt = self.query_one(Prompt)
        prompt.focus()
        return prompt.restore(text)

    def copy(self, text: str) -> None:
        """Copy to the terminal's clipboard, and to the system's unless the session is remote."""
        self.app.copy_to_clipboard(text)
        if terminal.has_system():
            run_worker(self, partial(self._copy_to_system, text), group="clipboard")
        else:
            self.toast(terminal.describe(text, None), title="Copied")

    @property
    def _transcript(self) -> Transcript:
        return self.query_one(Transcript)

    def _add(self, widget: Widget) -> None:
        """Mount in the background, in the order of the calls."""
        run_worker(self, partial(self._transcript.add, widget), group="messages")

    async def _copy_to_system(self, text: str) -> None:
        if refusal := await terminal.copy_to_system(text):
            self.toast(terminal.describe(text, refusal), title="Clipboard", severity="warning", timeout=10)
        else:
            self.toast(terminal.describe(text, refusal), title="Copied")

    def _show_switches(self) -> None:
        positions = self.controller.answers.switch_positions
        self.query_one(Ribbon).ticks = self.query_one(Timeline).ticks = positions

    async def _run(self, action: Action, argument: str, is_typed: bool = False) -> None:
        """Run an action, or queue it until the model is loaded or the questions before it are answered."""
        if self.controller.has_to_wait(action.needs_model(argument), is_typed and action.keeps_turn(argument)):
            line = f"/{action.command} {argument}".rstrip()
            await self.controller.defer(line, partial(self.run_command, line, is_its_turn=True))
        elif action.run:
            await action.run(self.controller, argument)
        else:
            namespace, _, name = action.action.rpartition(".")
            await self.app.run_action((namespace, name, (argument,)) if action.usage else action.action, self)

    def _welcome(self) -> Welcome:
        return Welcome(self.controller.models.in_use.model, self._key, self.controller.replay.name)

    def _surroundings(self) -> Surroundings:
        return Surroundings(self.controller.state, self._themes, self.app.theme)

    def _key(self, id: str) -> str:
        return describe_keys(BY_ID[id], self._keys)

    async def _edit_outside(self) -> None:
        prompt = self.query_one(Prompt)
        with errors_as_toasts(self.app):
            prompt.replace_all(await external_editor.edit_suspended(self.app, prompt.written.text))

    async def _open_archive(self) -> None:
        latest = await self.controller.open_archive(self._resume)
        if latest is not None:
            for welcome in self.query(Welcome):
                welcome.offer(latest.title)
        prompt = self.query_one(Prompt)
        if self._first_question and prompt.text == self._first_question:  # the user has not sent or changed it
            prompt.action_send()  # only now: it belongs to the resumed conversation
        await self.controller.keep()
