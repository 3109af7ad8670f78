"""The application: themes, the engine client, the chat screen, the command palette, and keys that act in order."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.driver import Driver
from textual.errors import NoWidget
from textual.events import Event, Key, MouseEvent, Paste
from textual.filter import DimFilter, LineFilter, Monochrome, NoColor
from textual.markup import escape
from textual.message_pump import MessagePump
from textual.timer import Timer
from textual.widget import MountError
from textual.worker import WorkerFailed

from kvchat.config.modes import AUTO, choosable, mode_names
from kvchat.errors import UsageError, did_you_mean, resolve
from kvchat.foreign_text import visible
from kvchat.protocol.client import EngineClient
from kvchat.tui import themes
from kvchat.tui.actions import COMMANDS, KEYED, bindings
from kvchat.tui.panel_rows import has_gpu
from kvchat.tui.rebinding import check_keys, describe_keys
from kvchat.tui.screens.base import Palette, open_once
from kvchat.tui.screens.chat import ChatScreen
from kvchat.tui.screens.help import HelpScreen
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.settings import SettingsEditor
from kvchat.tui.state import AppConfig
from kvchat.tui.terminal import VisibleText, decode_leniently, has_vanished
from kvchat.tui.widgets.base import unskipped

# Signals that would end the process at once. No handler can recover from a crash inside a library (SIGSEGV etc.).
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
REACHED = ("chat", "prompt", "transcript", "ribbon", "panels")  # whose keys the palette offers
MOST_TOASTS = 4  # that fit on 80x24
LONGEST_S = 5.0  # the longest that a key waits for the effects of the previous one
# Thresholds of the garbage collector. At Python's 700 objects, an answer causes a full collection of up to 0.25 s every
# second, a fifth of the interface's CPU time. If collections stayed as rare as during the start
# (``process.postpone_full_collections``), each would block the screen for seconds.
GARBAGE = 5_000, 10, 10


def run(config: AppConfig) -> int:
    """Run the application until the user leaves and return the exit code; no engine outlives it."""
    app = KvchatApp(config)
    try:
        gc.freeze()  # modules are never garbage
        gc.set_threshold(*GARBAGE)
        app.run()
    finally:
        app.client.kill()
    return app.return_code or 0


class CommandProvider(Provider):
    """The palette: types commands that take an argument into the prompt, runs the others.

    Titles and descriptions are escaped, because Textual reads them as markup and some come from themes and packages.
    """

    async def discover(self) -> Hits:
        for choice in self._choices():
            yield DiscoveryHit(_one_line(Content(choice.title), choice.help), choice.callback, choice.title)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for choice in self._choices():
            score = max(matcher.match(choice.title), matcher.match(choice.help) * 0.5)
            if score > 0:
                title = matcher.highlight(escape(choice.title))
                yield Hit(score, _one_line(title, choice.help), choice.callback, choice.title)

    def _choices(self) -> Iterator[SystemCommand]:
        app = self.app
        assert isinstance(app, KvchatApp)
        return choices(app.chat, app.keys, app.themes)


def _one_line(title: Content, doc: str) -> Content:
    return Content.assemble(title, "  ", (doc, "not bold"))


def choices(chat: ChatScreen, keys: Mapping[str, str], themes: Iterable[str]) -> Iterator[SystemCommand]:
    """Yield the lines of the palette, with the ``keys`` that the user changed.

    The chat runs them in order with typed text, so that a question typed after ``new`` is not asked before it.
    """
    run = partial(chat.call_later, chat.run_command)
    for action in sorted(COMMANDS.values(), key=attrgetter("rarity")):
        doc = f"{action.brief}  {describe_keys(action, keys)}".rstrip()
        start = partial(chat.begin_command, f"/{action.command} ") if action.usage else partial(run, action.line)
        yield SystemCommand(action.line, doc, start)
    commands = [action.run for action in COMMANDS.values() if action.run]
    for action in KEYED:
        if action.scope in REACHED and action.run not in commands:
            doc = f"{action.doc}  {describe_keys(action, keys)}"
            start = partial(chat.call_later, chat.run_from_palette, action.id)
            yield SystemCommand(action.id.replace(".", " "), doc, start)
    for name in (AUTO, *mode_names()):
        yield SystemCommand(f"mode {name}", choosable()[name].title, partial(run, f"/mode {name}"))
    for name in themes:
        yield SystemCommand(f"theme {name}", "colors", partial(run, f"/theme {name}"))


class KeysInTurn:
    """Passes keys and pastes to the application by ``pass_on``, each after those before it have taken effect.

    In Textual a widget inserts a letter at once, while a bound key first goes through all its parents. So keys that a
    slow connection delivers together would act in another order: ``teh``, Backspace twice and ``he`` would become
    ``teh`` again, and keys after Esc would go to the screen that is just closing.
    """

    def __init__(self, app: App[None], pass_on: Callable[[Event], Awaitable[None]]) -> None:
        self._app, self._pass_on = app, pass_on
        self._waiting: deque[Event] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, event: Event) -> None:
        self._waiting.append(event)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._act(), LONGEST_S)

    async def _act(self) -> None:
        """Pass on the next keys and wait until all widgets on their way have handled them and each other's messages."""
        passed: list[tuple[Event, DOMNode]] = []
        await _done(self._app, partial(self._forward, passed))
        if not passed:
            self._waiting.clear()  # the application closes
        elif not _is_taken(*passed[-1]):
            # Twice, for the messages that they send each other, and even for a stopped event: Textual stops an event
            # when it hands it to the application.
            for node in passed[-1][1].ancestors_with_self * 2:
                await _done(node)
            await _done(self._app.screen)  # it may have been opened just now

    async def _forward(self, passed: list[tuple[Event, DOMNode]]) -> None:
        """Pass on letters together with the key after them, so that a text field is drawn once."""
        while self._waiting and (not passed or _is_taken(*passed[-1])):
            event = self._waiting.popleft()
            # If nothing has the focus, focus the widget that has it when the screen opens. Textual does not do so while
            # the terminal is in the background, and drops the focus at a click beyond the edge of a shrunk terminal.
            self._app.app_focus = True
            self._app.screen._update_auto_focus()
            passed.append((event, self._app.focused or self._app.screen))
            await self._pass_on(event)


def _is_taken(event: Event, target: DOMNode) -> bool:
    """Return whether the event is a letter that a text field inserts, which happens in the order of typing."""
    return isinstance(event, Key) and target.check_consume_key(event.key, event.character)


async def _done(pump: MessagePump, work: Callable[[], Awaitable[None]] | None = None) -> None:
    """Wait until ``pump`` has handled all messages sent so far and then done ``work``."""
    done = asyncio.Event()

    async def finish() -> None:
        try:
            if work is not None:
                await work()
        finally:
            done.set()

    if pump.call_later(finish):  # False while it closes
        await done.wait()


class KvchatApp(App[None]):
    """Owns the themes, the keys and the engine's child process; ``chat`` owns everything on the screen.

    ``keys`` holds the changed keys by the id of their action.
    """

    TITLE = "kvchat"
    # Textual cuts off toasts below the screen: on 80x24 the third one with its own padding, the fourth with its own
    # width. It fails to draw an option list that is zero columns wide.
    CSS = """
    ToastRack { dock: top; align: right top; margin: 1 0 0 0; }
    Toast { padding: 0 1; max-width: 75%; }
    OptionList { min-width: 12; }
    CommandList { text-wrap: nowrap; text-overflow: ellipsis; }
    """
    COMMANDS = {CommandProvider}  # noqa: RUF012  (Textual's own declaration)
    BINDINGS: ClassVar[list[BindingType]] = bindings("app")

    def __init__(self, config: AppConfig) -> None:
        super().__init__()
        self._visible_text = VisibleText()
        self._no_color = NoColor()
        self._readable_dim = DimFilter(themes.DIM)
        self.config = config
        self._handlers: dict[signal.Signals, Any] = {}  # what ``_leave_on_signals`` replaced
        self.client = EngineClient(config.engine_command, config.log_file, config.recorder)
        self.themes, self._theme_problems = themes.load_all(config.theme_dirs)
        self.keys: dict[str, str] = {}
        self.chat = ChatScreen(config, self.client, self.keys, tuple(self.themes))
        self.controller = self.chat.controller
        self.settings = SettingsEditor(config, self.controller, self)
        self._keys_in_turn = KeysInTurn(self, super().on_event)

    def set_timer(self, *arguments: Any, **options: Any) -> Timer:
        """Call back once, late rather than never: after a skipped callback Textual would ignore every new size."""
        return unskipped(super().set_timer(*arguments, **options))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return the ribbon's colors, for themes without them."""
        return themes.RIBBON_DEFAULTS

    def get_driver_class(self) -> type[Driver]:
        """Return the driver of this platform or of TEXTUAL_DRIVER, changed to survive bytes that are not UTF-8."""
        return decode_leniently(super().get_driver_class())

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters, one for control characters, and one that keeps dim text readable."""
        filters = super().get_line_filters()
        if self.current_theme.ansi:  # the terminal's own colors cannot be turned into grays for NO_COLOR
            own = [self._no_color if isinstance(one, Monochrome) else one for one in filters]
            return (*own, self._visible_text)
        return (*filters, self._readable_dim, self._visible_text)

    def notify(self, message: str, *, title: str = "", markup: bool = False, **options: Any) -> None:
        """Show a toast, with control characters as marks, and by default with markup as plain text."""
        super().notify(visible(message), title=visible(title), markup=markup, **options)

    def on_notify(self) -> None:
        """Remove the oldest toasts, which would push the new one below a small screen."""
        for oldest in list(self._notifications)[: 1 - MOST_TOASTS]:
            self._unnotify(oldest, refresh=False)

    def _handle_exception(self, error: Exception) -> None:
        """Ignore handlers that fail because the closing application has removed their widgets."""
        cause = error.error if isinstance(error, WorkerFailed) else error
        is_closing = self._exit or not self.is_running
        if not (is_closing and isinstance(cause, NoMatches | MountError)):
            super()._handle_exception(error)

    async def on_event(self, event: Event) -> None:
        """Handle an event: keys in the order of typing, and no mouse event for a widget that was just removed."""
        if isinstance(event, Key | Paste) and not event.is_forwarded:
            self._keys_in_turn.add(event)
        elif not (isinstance(event, MouseEvent) and self._hits_removed(event)):
            await super().on_event(event)

    def _hits_removed(self, event: MouseEvent) -> bool:
        """Return whether the widget was removed but stays on the screen until the next layout: Textual would fail."""
        try:
            return not self.get_widget_at(event.x, event.y)[0].is_attached
        except NoWidget:
            return False

    def on_load(self) -> None:
        self._leave_on_signals()  # before Textual takes over the terminal

    def on_mount(self) -> None:
        if self.config.recorder:
            self.config.recorder.report = partial(self.notify, title="Recording", severity="warning", timeout=12)
        for theme in self.themes.values():
            self.register_theme(theme)
        try:
            self.use_theme(self.config.theme)
        except UsageError as unknown:
            self._theme_problems.append(unknown)
            self.theme = themes.DEFAULT
        try:
            self.rebind(self.config.keys)
        except UsageError as refused:
            self.notify(str(refused), title="Keys", severity="warning", timeout=12)
        self.push_screen(self.chat)
        for wrong in self.config.problems:
            self.notify(wrong, title="Settings", severity="warning", timeout=12)
        for problem in self._theme_problems:
            self.notify(str(problem), title="Theme", severity="warning", timeout=12)

    async def on_unmount(self) -> None:
        await self.controller.close()
        await self.client.close()
        if self.config.recorder:
            self.config.recorder.close()
        if self._driver:
            self._driver.close()  # waits until the codes that restore the terminal are written
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _leave_on_signals(self) -> None:
        """Let signals end the application as a key does: restore the terminal, end the engine.

        If the terminal is gone, exit at once: Textual would wait forever to write to it, or does so already.
        """
        loop = asyncio.get_running_loop()

        def leave(number: int, _frame: object) -> None:
            if has_vanished():
                self.client.kill()
                os._exit(128 + number)
            loop.call_soon_threadsafe(self.exit, None, 128 + number)

        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup ignores SIGHUP
                    self._handlers[number] = signal.signal(number, leave)

    def rebind(self, keys: Mapping[str, str]) -> None:
        """Change keys, given by the id of their action; all others get their defaults."""
        check_keys(keys)
        self.keys.clear()
        self.keys.update({id: key.lower() for id, key in keys.items()})
        self.set_keymap(self.keys)

    async def action_quit(self) -> None:
        """Quit; if unsaved text would be lost, only at the second request."""
        if self.controller.may_leave():
            self.exit()

    def action_command_palette(self) -> None:
        """Show the palette, unless one is open already, perhaps below another screen."""
        open_once(self, Palette())  # Textual's own has a fixed id, which would clash with a closing one

    def action_help(self) -> None:
        """Show or close the help, unless another screen covers it."""
        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        else:
            snapshot = self.controller.state.snapshot
            on_gpu = snapshot is None or has_gpu(snapshot)
            open_once(self, HelpScreen(self.keys, on_gpu))

    def action_settings(self) -> None:
        """Show or close the settings, unless another screen covers them."""
        if isinstance(self.screen, SettingsScreen):
            self.screen.dismiss()
        else:
            open_once(self, SettingsScreen(self.settings))

    def action_theme(self, name: str) -> None:
        """Change the theme; without a name, list all."""
        if name:
            self.use_theme(resolve(name, self.themes, "theme"))
        else:
            self.chat.add_note(f"Themes: {', '.join(self.themes)}   (now {self.theme})")

    def use_theme(self, name: str) -> None:
        if name not in self.themes:
            own = "".join(f" Your own are files in {folder}." for folder in self.config.theme_dirs)
            raise UsageError(f'There is no theme "{name}".', f"{did_you_mean(name, self.themes)}{own}")
        self.theme = name
