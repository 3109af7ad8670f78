"""ShownChat: the controller's ``ChatView``, by the widgets of the chat screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget

from kvchat.conversations.conversation import Message
from kvchat.conversations.store import Summary
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Details, Switched
from kvchat.tui import terminal
from kvchat.tui.controller import ChatController
from kvchat.tui.screens import compare
from kvchat.tui.screens.base import open_once
from kvchat.tui.screens.choosing import ModelsScreen
from kvchat.tui.screens.details import DetailsScreen
from kvchat.tui.state import ChatState, Footed, RunningComparison
from kvchat.tui.view import Severity, SwitchView, WayOut
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.bars import ModeBar, StatusBar
from kvchat.tui.widgets.base import run_beside
from kvchat.tui.widgets.composer import Composer, Prompt
from kvchat.tui.widgets.messages import Note, Problem, Question, SwitchNote
from kvchat.tui.widgets.panels import DetailColumn, EventLog, KvColumn, Timeline
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.transcript import Gutter, Transcript, past
from kvchat.tui.widgets.welcome import ConversationColumn, Welcome


class ShownChat(Screen[None]):
    """The part of ``ChatScreen`` that the controller calls."""

    controller: ChatController

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
        await self._transcript.replace_below(below, past(messages) or ([] if below else [self._welcome()]))

    def show_footer(self, message: Message, footer: str) -> None:
        self._transcript.show_footer(message.id, footer)

    async def add_question(self, text: str, queued: bool) -> Question:
        await self._transcript.query(Welcome).remove()
        return await self._transcript.add(Question(text, queued))

    async def add_command(self, line: str) -> Question:
        return await self._transcript.add(Question(line, queued=True))

    async def add_answer(self) -> Answer:
        return await self._transcript.add(Answer())

    async def add_switch(self, switched: Switched, speed: float | None) -> SwitchView:
        answer = next((one for one in self._transcript.query(Answer) if not one.finished), None)
        if answer is not None:
            return answer.mark(switched, speed)
        return await self._transcript.add(SwitchNote(switched, speed))

    def add_way_back(self, switched: Switched) -> None:
        """Show nothing: the line of the switch before is gone."""

    def add_note(self, text: str, struck: str = "") -> None:
        self._add(Note(Content.assemble(visible(text), (visible(struck), "strike dim"))))

    def add_error(self, error: KvchatError, ways_out: Sequence[WayOut] = ()) -> None:
        self._add(Problem(error, ways_out))

    def toast(self, text: str, title: str = "", severity: Severity = "information", timeout: float = 5.0) -> None:
        self.app.notify(text, title=title, severity=severity, timeout=timeout)

    def log_event(self, text: str) -> None:
        self.query_one(EventLog).add(visible(text))
        if isinstance(self.app.screen, DetailsScreen):
            self.app.screen.show()

    def show_state(self, state: ChatState) -> None:
        bar = self.query_one(ModeBar)
        bar.info, bar.phase, bar.stage, bar.download = state.info, state.phase, state.stage, state.download
        bar.mode, bar.params = state.mode, state.params
        self.query_one(Composer).show_editing(state.edited is not None, state.edits_answer)

    def show_queue(self, waiting: int, is_held: bool) -> None:
        self.query_one(Composer).show_queue(waiting, is_held)

    def show_snapshot(self, snapshot: Snapshot | None, answering: bool = False) -> None:
        if snapshot is None:
            self._clear_figures()
            return
        self.query_one(Gutter).show(self.controller.state.marks(snapshot))
        self._show_switches()
        self.query_one(Ribbon).snapshot = snapshot
        self.query_one(StatusBar).add(snapshot, answering)
        self.query_one(KvColumn).show(snapshot)
        self._show_details()

    def show_details(self, details: Details) -> None:
        self._show_details()

    def show_page_text(self, start: int, text: str) -> None:
        self.query_one(Ribbon).show_text(start, text)

    def show_comparison(self, shown: RunningComparison) -> None:
        compare.show(self.app, self.controller.comparisons, shown)

    def show_conversations(self, kept: Sequence[Summary], present: str) -> None:
        self.query_one(ConversationColumn).show(kept, present)

    def show_models(self) -> None:
        open_once(self.app, ModelsScreen(self.controller))

    def restore_prompt(self, text: str) -> bool:
        prompt = self.query_one(Prompt)
        prompt.focus()
        return prompt.restore(text)

    def copy(self, text: str) -> None:
        """Copy to the terminal's clipboard, and to the system's where that is the person's."""
        self.app.copy_to_clipboard(text)
        if terminal.has_system():
            run_beside(self, partial(self._copy_to_system, text), group="clipboard")
        else:
            self.toast(terminal.describe(text, None), title="Copied")

    # ---- helpers ---------------------------------------------------------------------------------

    @property
    def _transcript(self) -> Transcript:
        return self.query_one(Transcript)

    def _add(self, widget: Widget) -> None:
        """Mount without waiting, in the order of the calls."""
        run_beside(self, partial(self._transcript.add, widget), group="messages")

    async def _copy_to_system(self, text: str) -> None:
        refusal = await terminal.copy_to_system(text)
        if refusal:
            self.toast(terminal.describe(text, refusal), title="Clipboard", severity="warning", timeout=10)
        else:
            self.toast(terminal.describe(text, refusal), title="Copied")

    def _show_switches(self) -> None:
        positions = self.controller.answers.switch_positions
        self.query_one(Ribbon).ticks = self.query_one(Timeline).ticks = positions

    def _show_details(self) -> None:
        self.query_one(DetailColumn).show(self.controller.state)
        if isinstance(self.app.screen, DetailsScreen):
            self.app.screen.show()

    def _clear_figures(self) -> None:
        self.query_one(Ribbon).clear()
        self.query_one(Gutter).show(None)
        self.query_one(StatusBar).clear()
        self.query_one(KvColumn).clear()
        self._show_details()

    def _welcome(self) -> Welcome:
        """The first screen of a new conversation."""
        raise NotImplementedError

    @contextmanager
    def _unwritten_history_as_toast(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.toast(f"The prompt history cannot be written: {error.strerror}.", severity="warning")
