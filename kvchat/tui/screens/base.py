"""Bases of the screens over the chat: one of a kind, each closes itself only; some search in a list."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from textual import work
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.binding import BindingType
from textual.command import Command, CommandList, CommandPalette
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList

from kvchat.errors import KvchatError
from kvchat.tui.actions import bindings

Found = TypeVar("Found")


@contextmanager
def refusals_as_toasts(app: App[None]) -> Iterator[None]:
    try:
        yield
    except KvchatError as error:
        app.notify(str(error), severity="warning")


def css_of(screen: str, width: int) -> str:
    """The styles of the screen of that name: Textual applies a screen's ``CSS`` by the name of its own class only."""
    return f"""
    {screen} > Vertical {{ width: {width}; height: 90%; }}
    {screen} Input {{ border: none; height: 1; margin: 0 0 1 0; background: $surface; }}
    {screen} OptionList {{ height: 1fr; border: none; padding: 0; background: $surface; }}
    {screen} Static {{ color: $text-muted; height: 1; }}
    """


class SearchField(Input):
    """It alone takes the focus and no key has priority, so that all keys wait in one queue and act in their order.

    The keys of the screen are its own, in place of those of a line that are the same.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings("search")


class FoundList(OptionList, can_focus=False):
    """The results; the keys that move in them come through the field."""


class Dialog(ModalScreen[None]):
    """A box in the middle of what lies below it."""

    DEFAULT_CSS = """
    Dialog { align: center middle; }
    Dialog > Vertical { max-width: 100%; padding: 0 1; background: $surface; border: round $primary; }
    """

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, unless another screen is on top, which Textual would close: a key pressed twice reaches one twice."""
        return super().dismiss(result) if self.is_active else AwaitComplete()


class SearchScreen(Dialog, Generic[Found]):
    """``shown`` are the things in the list, by the ids of their options."""

    AUTO_FOCUS = "SearchField"

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Found] = {}

    def action_move(self, move: str) -> None:
        getattr(self.query_one(OptionList), f"action_{move}")()

    @property
    def highlighted(self) -> Found | None:
        """The result that Enter would take."""
        option = self.query_one(OptionList).highlighted_option
        return self.shown.get(option.id or "") if option else None


def open_once(app: App[None], screen: Screen[None]) -> None:
    """Open ``screen``, unless one of its kind is open already, perhaps below others.

    Two keys in turn would pile up screens without end, and Textual draws each through all below it: at some 45 Python
    allows no deeper call.
    """
    if not any(type(opened) is type(screen) for opened in app.screen_stack):
        app.push_screen(screen)


class Palette(CommandPalette):
    """The command palette; what is found when it is closed already is shown nowhere."""

    def dismiss(self, result: Any = None) -> AwaitComplete:
        """As a dialog."""
        return super().dismiss(result) if self.is_active else AwaitComplete()

    @work(exclusive=True, group=CommandPalette._GATHER_COMMANDS_GROUP)
    async def _gather_commands(self, search_value: str) -> None:
        """Textual's, which begins by asking for the list: it is no more, or not yet, where a palette closes at once."""
        if self in self.app.screen_stack:
            await inspect.unwrap(CommandPalette._gather_commands)(self, search_value)

    def _refresh_command_list(self, command_list: CommandList, commands: list[Command], clear_current: bool) -> None:
        if self in self.app.screen_stack:
            super()._refresh_command_list(command_list, commands, clear_current)
