"""Screens over the chat: one of a kind, and each closes itself only."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, TypeAlias

from textual import work
from textual.app import App, ComposeResult
from textual.await_complete import AwaitComplete
from textual.command import Command, CommandList, CommandPalette
from textual.events import Click
from textual.screen import Screen

from kvchat.tui.widgets.options import PaletteOptions

if TYPE_CHECKING:
    Closing: TypeAlias = Screen[None]
else:
    Closing = object  # Textual looks for a screen's styles in its first base only


def open_once(app: App[None], screen: Screen[None]) -> None:
    """Open ``screen``, unless one of its kind is open already, perhaps below others.

    Two keys in turn would pile up screens without end, and Textual draws each through all below it: at some 45 Python
    allows no deeper call.
    """
    if not any(type(opened) is type(screen) for opened in app.screen_stack):
        app.push_screen(screen)


class ClosesOnce(Closing):
    """Textual closes the screen on top, whichever asks; a key pressed twice reaches one twice before it is gone."""

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, unless another screen is on top: this one has been closed, or lies below."""
        return super().dismiss(result) if self.is_active else AwaitComplete()


class Palette(ClosesOnce, CommandPalette):
    """The command palette; what is found when it is closed already is shown nowhere."""

    def compose(self) -> ComposeResult:
        """Textual's widgets, with a list of ours."""
        for widget in super().compose():
            yield PaletteOptions() if isinstance(widget, CommandList) else widget

    def on_click(self, event: Click) -> None:
        """Ignore a click where there was a terminal when it was made: Textual fails at the place."""
        if not self.region.contains_point(event.screen_offset):
            event.prevent_default()

    @work(exclusive=True, group=CommandPalette._GATHER_COMMANDS_GROUP)
    async def _gather_commands(self, search_value: str) -> None:
        """Textual's, which begins by asking for the list: it is no more, or not yet, where a palette closes at once."""
        if self in self.app.screen_stack:
            await inspect.unwrap(CommandPalette._gather_commands)(self, search_value)

    def _refresh_command_list(self, command_list: CommandList, commands: list[Command], clear_current: bool) -> None:
        if self in self.app.screen_stack:
            super()._refresh_command_list(command_list, commands, clear_current)
