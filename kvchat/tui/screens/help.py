"""Help: keys, commands and modes, from the tables that define them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from kvchat.config.modes import ModeParameters
from kvchat.conversations import comparison
from kvchat.foreign_text import visible
from kvchat.tui.actions import ACTIONS, BY_ID, COMMANDS, FIRST_KEYS, bindings
from kvchat.tui.models import PLANNED
from kvchat.tui.panel_rows import FIGURES
from kvchat.tui.rebinding import describe_keys, keys_of
from kvchat.tui.screens.base import Dialog
from kvchat.tui.state import RECEIPT, SUMS
from kvchat.tui.widgets.bars import STATUS, KeyHints
from kvchat.tui.widgets.panels import legend


class HelpScreen(Dialog):
    """Scrolls; the key that opened it closes it too."""

    CSS = """
    HelpScreen > Vertical { width: 92; }
    HelpScreen VerticalScroll {
        padding: 0 1; background: $surface;
        scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $foreground 25%;
    }
    HelpScreen .title { color: $primary; text-style: bold; margin: 0; }
    HelpScreen Static { margin: 0 0 1 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("help")

    def __init__(self, modes: Sequence[type[ModeParameters]], keys: Mapping[str, str], on_gpu: bool) -> None:
        super().__init__()
        self._modes = modes
        self._keys = keys
        self._on_gpu = on_gpu

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "kvchat help"
            with VerticalScroll():
                yield from self._sections()
            yield KeyHints()

    def _sections(self) -> Iterator[Static]:
        color = Color.parse(self.app.theme_variables["accent"])
        offered = [mode for mode in self._modes if not mode.for_comparison]
        compared = [(mode.name, mode.title) for mode in self._modes if mode.for_comparison]
        first = [(describe_keys(BY_ID[id], self._keys).split(" / ")[0], words) for id, words in FIRST_KEYS.items()]
        sections = (
            ("To begin with", first),
            ("Keys", key_rows(self._keys)),
            ("Commands", [(action.line, action.doc) for action in COMMANDS.values()]),
            ("KV modes", mode_rows(offered)),
            ("Methods of other papers, for comparison", compared),
            ("What the figures mean", figure_rows(offered)),
        )
        for title, rows in sections:
            yield Static(title, classes="title")
            yield Static(table(rows, color))
        yield Static("Ribbon", classes="title")
        yield Static(legend(self._on_gpu))


def table(rows: Iterable[tuple[str, str]], color: Color) -> Table:
    """Lay out two columns; text wraps in the second."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style=Style(color=color.rich_color))
    grid.add_column()
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def key_rows(rebound: Mapping[str, str]) -> list[tuple[str, str]]:
    """The keys in force, where ``rebound`` holds the changed ones by id of their action."""
    return [(describe_keys(action, rebound), action.doc) for action in ACTIONS if keys_of(action, rebound)]


def figure_rows(modes: Sequence[type[ModeParameters]]) -> list[tuple[str, str]]:
    """The meaning of the figures, by the part of the screen and by the mode that has them."""
    of_modes = {f"{mode.name} mode": mode.figures for mode in modes if mode.figures}
    others = {
        "status bar and receipts": STATUS,
        "receipts": RECEIPT,
        "comparisons": comparison.FIGURES,
        "/stats": SUMS,
        "/plan": PLANNED,
    }
    rows = []
    for place, figures in {**FIGURES, **of_modes, **others}.items():
        rows.append((place, ""))
        rows += [(f"  {visible(label)}", visible(text)) for label, text in figures.items()]
    return rows


def mode_rows(modes: Sequence[type[ModeParameters]]) -> list[tuple[str, str]]:
    """Each mode followed by its parameters."""
    rows = []
    for mode in modes:
        rows.append((mode.name, mode.title))
        rows += [(f"  {name}", field.description or "") for name, field in mode.model_fields.items()]
    return rows
