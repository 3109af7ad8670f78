"""The chat screen: composes the widgets, takes the user's actions and hands the engine's events on."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from kvchat.config import modes
from kvchat.errors import EngineError, KvchatError, UsageError
from kvchat.protocol.messages import Command, Params, Peek, Rebuild, Stop, Switch
from kvchat.tui import commands
from kvchat.tui.conversation import Conversation
from kvchat.tui.history import PromptHistory
from kvchat.tui.screens.events import EngineEvents
from kvchat.tui.screens.help import HelpScreen
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.widgets.bars import KeyHints, ModeBar, StatusBar
from kvchat.tui.widgets.messages import Note, Problem, Question
from kvchat.tui.widgets.panels import DetailColumn, KvColumn, price_text
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.timeline import Timeline
from kvchat.tui.widgets.transcript import NewLines, Transcript, Welcome

if TYPE_CHECKING:
    from kvchat.tui.app import KvchatApp

QUIT_WINDOW_S = 2.0
PEEK_TOKENS = 128  # more than a line holds
WELCOME = "Ask something. Everything said stays stored; F6 changes how much of it the model reads, even mid-answer."


class ChatScreen(Screen[None]):
    """One conversation with one engine."""

    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012  (Textual declares it)
        (0, "-tiny"),
        (40, "-narrow"),
        (100, "-wide"),
        (160, "-ultra"),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (12, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = "Prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "escape", "stop", key_display="esc", id="stop"),
        Binding("ctrl+c", "interrupt", "Copy or stop", show=False, priority=True, id="interrupt"),
        Binding("f5", "regenerate", "Again", show=False, priority=True, id="regenerate"),
        Binding("f6", "mode(1)", "mode", key_display="F6", priority=True, id="mode.next"),
        Binding("shift+f6", "mode(-1)", "Mode back", show=False, priority=True, id="mode.previous"),
        Binding("f7", "panels", "panels", key_display="F7", priority=True, id="panels"),
        Binding("ctrl+n", "new", "New", show=False, priority=True, id="new"),
        Binding("ctrl+p", "app.command_palette", "palette", key_display="^P", priority=True, id="palette"),
        Binding("f1", "help", "help", key_display="F1", priority=True, id="help"),
        Binding("pageup", "scroll_transcript(-1)", show=False, priority=True, id="page.up"),
        Binding("pagedown", "scroll_transcript(1)", show=False, priority=True, id="page.down"),
        Binding("ctrl+end", "newest", show=False, priority=True, id="newest"),
    ]

    def __init__(self, app: KvchatApp) -> None:
        super().__init__()
        config = app.config
        self.kvchat = app
        self.state = ChatState(Conversation(config.system), config.sampling, config.load.mode)
        self.queued: Question | None = None
        self.events = EngineEvents(self)
        self._history = PromptHistory(config.history_file)
        self._quit_armed = 0.0
        self._log_told = False

    def compose(self) -> ComposeResult:
        yield ModeBar()
        with Horizontal(id="body"):
            with Vertical(id="conversation"):
                yield Transcript()
                yield NewLines()
            yield KvColumn()
            yield DetailColumn()
        yield Ribbon()
        yield StatusBar()
        yield Prompt(self._history)
        yield KeyHints()
        yield Static(id="too-small")

    async def on_mount(self) -> None:
        self.query_one(ModeBar).mode = self.state.mode
        await self.query_one(Transcript).add(Welcome(WELCOME))
        self.run_worker(self.events.listen(), name="events")
        self.call_after_refresh(self._first_start)

    def on_resize(self) -> None:
        size = self.app.size
        self.query_one("#too-small", Static).update(f"kvchat needs 40x12, here are {size.width}x{size.height}")

    # ---- what the user does ----------------------------------------------------------------------

    async def on_prompt_sent(self, message: Prompt.Sent) -> None:
        """Enter: a command, or a question."""
        text = message.text
        if not text.strip():
            self.toast("There is nothing to send yet: type a question first.", severity="warning")
        elif commands.is_command(text):
            self._accept()
            await self._attempt(commands.run(self, text.strip()))
        else:
            await self.ask(text.removeprefix("/") if text.startswith("//") else text)

    async def ask(self, text: str) -> None:
        """Send a question, or queue it while the engine is loading or answering."""
        if self.queued is not None:
            self.toast("One question is waiting already; it is sent as soon as the engine is ready.")
            return
        self._accept()
        await self.transcript.query(Welcome).remove()
        ready, down = self.state.phase is Phase.READY, self.state.phase is Phase.DOWN
        question = Question(text, queued=not ready)
        if not ready:
            # Before anything is awaited: an engine that becomes ready meanwhile looks for it once.
            self.queued = question
        await self.transcript.add(question)
        if ready:
            await self.events.begin_answer(question)
        elif down:
            await self.restart()

    def command(self, line: str) -> None:
        """Run a slash command that was not typed (the palette)."""
        self.run_worker(self._attempt(commands.run(self, line)))

    def begin_command(self, line: str) -> None:
        """Type the beginning of a command for the user."""
        prompt = self.query_one(Prompt)
        prompt.load_text(line)
        prompt.move_cursor(prompt.document.end)
        prompt.focus()

    def stop(self) -> None:
        """Ask for the end of the answer; what there is of it stays."""
        if self.state.phase.busy:
            self.send(Stop())

    def switch(self, mode: str, params: Params | None = None) -> None:
        """Ask for another mode or other parameters; works in the middle of an answer.

        Raises:
            UsageError: an unknown mode, an unknown parameter or a value out of range.
        """
        target = mode or self.state.mode
        modes.parse(target, params or {})
        if self.state.info is None:
            raise UsageError("The model is not loaded yet.", "Modes can be changed as soon as it is.")
        if self.state.phase is Phase.DOWN:
            raise UsageError("The engine is down.", "/restart or the next question starts it again.")
        asked = {**self.state.take_later(target), **(params or {})}
        self.state.wanted = target
        self.state.pending |= asked
        self.send(Switch(mode, asked))

    def rebuild(self) -> None:
        """Compute anew what was computed with less context.

        Raises:
            UsageError: an answer is under way, or there is no engine.
        """
        if self.state.phase is not Phase.READY:
            raise UsageError("The engine is busy.", "Stop it with Esc first.")
        self.show_phase(Phase.PREFILL)
        self.send(Rebuild())

    def copy(self, text: str) -> None:
        """To the clipboard by OSC 52, which a terminal may ignore without a word."""
        self.app.copy_to_clipboard(text)
        self.toast(f"Sent {len(text):,} characters to the terminal's clipboard (OSC 52).", title="Copied")

    async def restart(self) -> None:
        """A fresh engine in the mode at hand; the conversation is kept, what was stored of it is read again."""
        await self.events.abandon()
        self.query_one(Ribbon).clear()
        self.show_phase(Phase.LOADING)
        await self._start(self.kvchat.client.restart())

    # ---- actions (keys) --------------------------------------------------------------------------

    def action_escape(self) -> None:
        """Stop, else back to the prompt."""
        self.stop()
        self.query_one(Prompt).focus()

    def action_interrupt(self) -> None:
        """Copy what is selected, else stop, else quit when pressed twice."""
        selected = self.query_one(Prompt).selected_text or self.get_selected_text()
        if selected:
            self.copy(selected)
        elif self.state.phase.busy:
            self.stop()
        elif monotonic() - self._quit_armed < QUIT_WINDOW_S:
            self.app.exit()
        else:
            self._quit_armed = monotonic()
            self.toast("Press Ctrl+C again to quit.", timeout=QUIT_WINDOW_S)

    async def action_regenerate(self) -> None:
        """Ask the last question again in place of its answer."""
        if self.state.phase is not Phase.READY:
            self.toast("The engine is busy: stop it with Esc first.", severity="warning")
        elif not self.state.conversation.reopen():
            self.toast("There is no question to answer again.", severity="warning")
        else:
            for answer in self.transcript.answers()[-1:]:
                await answer.remove()
            await self.events.begin_again()

    def action_mode(self, step: int) -> None:
        """The next or previous mode, counted from the one last asked for."""
        names = modes.mode_names()
        here = self.state.wanted or self.state.mode
        index = names.index(here) + step if here in names else 0
        try:
            self.switch(names[index % len(names)])
        except UsageError as error:
            self.toast(str(error), severity="warning")

    def action_panels(self) -> None:
        """Show or hide the panel columns."""
        shown = bool(self.query_one(KvColumn).display)
        self.set_class(not shown, "panels-on")
        self.set_class(shown, "panels-off")

    async def action_new(self) -> None:
        """Forget the conversation; a running answer is stopped."""
        self.stop()
        self.events.forget()
        await self.transcript.clear()
        await self.transcript.add(Welcome(WELCOME))

    def action_help(self) -> None:
        """Keys, commands and modes."""
        self.app.push_screen(HelpScreen(modes.mode_infos()))

    def action_newest(self) -> None:
        """Follow the newest line again."""
        self.transcript.jump_to_end()

    def action_scroll_transcript(self, direction: int) -> None:
        """One page, wherever the focus is."""
        if direction < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    # ---- what widgets ask for --------------------------------------------------------------------

    def on_transcript_below(self, message: Transcript.Below) -> None:
        self.query_one(NewLines).show(message.lines)

    def on_new_lines_clicked(self) -> None:
        self.action_newest()

    def on_ribbon_looked(self, message: Ribbon.Looked) -> None:
        if self.state.info is not None:
            self.send(Peek(message.start, min(message.end, message.start + PEEK_TOKENS)))

    # ---- for the commands and the events ---------------------------------------------------------

    @property
    def transcript(self) -> Transcript:
        """Where the messages are."""
        return self.query_one(Transcript)

    def say(self, text: str | Content) -> None:
        """A quiet note in the transcript."""
        self.show_message(Note(text))

    def show_error(self, error: KvchatError) -> None:
        """An error block in the transcript."""
        self.show_message(Problem(error))

    def show_message(self, widget: Widget) -> None:
        """Mount without waiting, in the order of the calls."""
        self.run_worker(self.transcript.add(widget), group="messages")

    def toast(self, text: str, title: str = "", severity: SeverityLevel = "information", timeout: float = 5.0) -> None:
        """A short notice in the corner; brackets in it are no markup."""
        self.app.notify(text, title=title, severity=severity, timeout=timeout, markup=False)

    def send(self, command: Command) -> None:
        """Hand a command to the engine; one too long is shown as an error."""
        try:
            self.kvchat.client.send(command)
        except UsageError as error:
            self.show_error(error)

    def mode_parameters(self) -> tuple[str, ...]:
        """Names of the parameters of the mode at hand."""
        return tuple(modes.registered()[self.state.mode].model_fields)

    def modes_text(self) -> str:
        """All modes, a line each, with what entering them would move."""
        prices = {price.mode: price_text(price) for price in self.state.snapshot.prices} if self.state.snapshot else {}
        lines = []
        for mode in modes.mode_infos():
            here = "●" if mode.name == self.state.mode else " "
            price = f"   ({prices[mode.name]})" if mode.name in prices else ""
            lines.append(f"{here} {mode.name:<12} {mode.title}{price}")
        return "\n".join(lines)

    def set_mode(self, mode: str, params: Params) -> None:
        """What the engine is in now."""
        self.state.mode, self.state.params, self.state.wanted = mode, params, mode
        bar = self.query_one(ModeBar)
        bar.mode, bar.params = mode, params

    def show_phase(self, phase: Phase, stage: str = "") -> None:
        """What the engine is doing now."""
        self.state.phase = phase
        bar = self.query_one(ModeBar)
        bar.phase, bar.stage = phase, stage

    def clear_instruments(self) -> None:
        """The ribbon and the timeline begin anew."""
        self.query_one(Ribbon).clear()
        self.query_one(Timeline).clear()

    async def _first_start(self) -> None:
        await self._start(self.kvchat.client.start())

    async def _start(self, starting: Coroutine[Any, Any, None]) -> None:
        """Start the engine and load; a model that cannot be loaded is the engine's to tell."""
        try:
            await starting
        except EngineError as error:
            self.show_phase(Phase.DOWN)
            self.show_error(error)
            return
        problem = self.kvchat.client.log_problem
        if problem and not self._log_told:
            self._log_told = True
            self.toast(f"{problem} Its messages are dropped.", title="Log", severity="warning", timeout=10)
        self.send(replace(self.kvchat.config.load, mode=self.state.mode, given=self.state.given))

    def _accept(self) -> None:
        try:
            self.query_one(Prompt).accept()
        except OSError as error:
            self.toast(f"The prompt history cannot be written: {error.strerror}.", severity="warning")

    async def _attempt(self, doing: Awaitable[None]) -> None:
        try:
            await doing
        except KvchatError as error:
            self.show_error(error)
