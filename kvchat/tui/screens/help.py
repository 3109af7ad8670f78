"""Help: keys, commands and modes, from the tables they are defined in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from kvchat.config.modes import ModeInfo
from kvchat.tui.commands import TABLE

KEYS = (
    ("Enter", "send"),
    ("Ctrl+J", "newline (Shift+Enter where the terminal knows it)"),
    ("Esc", "stop the answer and keep what there is; else back to the prompt"),
    ("Ctrl+C", "copy the selection; else stop; twice: quit"),
    ("F5", "answer the last question again"),
    ("F6 / Shift+F6", "next / previous KV mode, also in the middle of an answer"),
    ("F7", "show or hide the panels"),
    ("Up / Down", "earlier and later prompts, at the first and last line"),
    ("PgUp / PgDn", "scroll the transcript; Ctrl+End follows the newest again"),
    ("Tab", "to the transcript and the ribbon; there ← → show the stored text"),
    ("Ctrl+N", "new conversation"),
    ("Ctrl+P", "command palette"),
    ("Ctrl+Q", "quit"),
)


class HelpScreen(ModalScreen[None]):
    """Scrolls; Esc, F1 or q closes it."""

    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 92; max-width: 100%; height: auto; max-height: 100%; padding: 0 2;
        background: $surface; border: round $primary;
        scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $foreground 25%;
    }
    HelpScreen .title { color: $primary; text-style: bold; margin: 0; }
    HelpScreen Static { margin: 0 0 1 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", "Close", id="help.close")]

    def __init__(self, modes: tuple[ModeInfo, ...]) -> None:
        super().__init__()
        self._modes = modes

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "kvchat help"
            box.border_subtitle = "Esc closes"
            color = self.app.theme_variables["accent"]
            commands = [(entry.line, entry.doc) for entry in TABLE.values()]
            for title, rows in (("Keys", KEYS), ("Commands", commands), ("KV modes", mode_lines(self._modes))):
                yield Static(title, classes="title")
                yield Static(table(rows, color))


def table(rows: Iterable[tuple[str, str]], color: str) -> Table:
    """Two columns, the second wraps within itself."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style=color)
    grid.add_column()
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def mode_lines(modes: tuple[ModeInfo, ...]) -> list[tuple[str, str]]:
    """Each mode and its parameters."""
    rows = []
    for mode in modes:
        rows.append((mode.name, mode.title))
        rows += [(f"  {p.name}", p.doc) for p in mode.params]
    return rows
