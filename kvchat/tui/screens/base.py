"""Base classes of the screens over the chat: dialogs, dialogs that search in a list, and the command palette."""

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
def errors_as_toasts(app: App[None]) -> Iterator[None]:
    try:
        yield
    except KvchatError as error:
        app.notify(str(error), severity="warning")


def css_of(screen: str, width: int) -> str:
    """Return the CSS of the screen class named ``screen``; Textual scopes CSS to that name: it cannot be inherited."""
    return f"""
    {screen} > Vertical {{ width: {width}; height: 90%; }}
    {screen} Input {{ border: none; height: 1; margin: 0 0 1 0; background: $surface; }}
    {screen} OptionList {{ height: 1fr; border: none; padding: 0; background: $surface; }}
    {screen} Static {{ color: $text-muted; height: 1; }}
    """


class SearchField(Input):
    """The only widget that takes the focus. No key has priority, so that keys act in the order of typing.

    The keys of the screen are bound here and replace the same keys of ``Input``.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings("search")


class FoundList(OptionList, can_focus=False):
    """The results; the search field passes on the keys that move the highlight."""


class Dialog(ModalScreen[None]):
    """A box in the middle of the screen."""

    DEFAULT_CSS = """
    Dialog { align: center middle; }
    Dialog > Vertical { max-width: 100%; padding: 0 1; background: $surface; border: round $primary; }
    """

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, unless another screen is on top: Textual would close that one when a key is pressed twice quickly."""
        return super().dismiss(result) if self.is_active else AwaitComplete()


class SearchScreen(Dialog, Generic[Found]):
    """A dialog with a search field; ``shown`` holds the results by the ids of their options."""

    AUTO_FOCUS = "SearchField"

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Found] = {}

    def action_move(self, move: str) -> None:
        getattr(self.query_one(OptionList), f"action_{move}")()

    @property
    def highlighted(self) -> Found | None:
        """The result that Enter would choose."""
        option = self.query_one(OptionList).highlighted_option
        return self.shown.get(option.id or "") if option else None


def open_once(app: App[None], screen: Screen[None]) -> None:
    """Open ``screen``, unless one of its class is open already, perhaps below others.

    Otherwise pressing two keys in turn would pile up screens, which Textual draws recursively; about 45 of them reach
    Python's recursion limit.
    """
    if not any(type(opened) is type(screen) for opened in app.screen_stack):
        app.push_screen(screen)


class Palette(CommandPalette):
    """The command palette; commands found after it was closed are dropped."""

    def dismiss(self, result: Any = None) -> AwaitComplete:
        """Close as ``Dialog`` does."""
        return super().dismiss(result) if self.is_active else AwaitComplete()

    @work(exclusive=True, group=CommandPalette._GATHER_COMMANDS_GROUP)
    async def _gather_commands(self, search_value: str) -> None:
        """Call Textual's method unless the palette is closed, because it queries the list, which is then gone."""
        if self in self.app.screen_stack:
            await inspect.unwrap(CommandPalette._gather_commands)(self, search_value)

    def _refresh_command_list(self, command_list: CommandList, commands: list[Command], clear_current: bool) -> None:
        if self in self.app.screen_stack:
            super()._refresh_command_list(command_list, commands, clear_current)
