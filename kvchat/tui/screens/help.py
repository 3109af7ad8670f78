"""The help screen: keys, commands, modes and figures, from the tables that define them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Input, Static

from kvchat.config.modes import ModeParameters, choosable
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
    """A scrolling text that typing filters; the key that opened it also closes it."""

    CSS = """
    HelpScreen > Vertical { width: 92; }
    HelpScreen VerticalScroll {
        padding: 0 1; background: $surface;
        scrollbar-size-vertical: 1; scrollbar-background: $surface; scrollbar-color: $foreground 25%;
    }
    HelpScreen .title { color: $primary; text-style: bold; margin: 0; }
    HelpScreen Static { margin: 0 0 1 0; }
    HelpScreen #no-match { display: none; color: $text-muted; }
    HelpScreen Input { border: none; height: 1; margin: 0 0 1 0; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("help")

    def __init__(self, keys: Mapping[str, str], on_gpu: bool) -> None:
        super().__init__()
        self._keys = keys
        self._on_gpu = on_gpu

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "kvchat help"
            yield Input(placeholder="type to filter")
            with VerticalScroll(can_focus=False):
                for title, rows in self._sections():
                    yield Static(title, classes="title")
                    yield Static(table(rows, self._color), classes="rows")
                yield Static("Nothing found.", id="no-match", markup=False)
                yield Static("Ribbon", classes="title ribbon")
                yield Static(legend(self._on_gpu), classes="ribbon")
            yield KeyHints()

    @property
    def _color(self) -> Color:
        return Color.parse(self.app.theme_variables["accent"])

    def action_scroll(self, how: str) -> None:
        """Scroll the text although the filter has the focus."""
        getattr(self.query_one(VerticalScroll), f"scroll_{how}")(animate=False)

    def on_input_changed(self, changed: Input.Changed) -> None:
        """Show only the rows that contain every typed word, and the sections that have such rows."""
        titles, bodies = self.query(".title"), self.query(".rows")
        is_found = not changed.value.strip()
        for title, body, (name, rows) in zip(titles, bodies, self._sections(), strict=False):
            found = matching(changed.value, name, rows)
            title.display = body.display = bool(found)
            is_found |= bool(found)
            cast("Static", body).update(table(found, self._color))
        self.query(".ribbon").set(display=not changed.value.strip())
        self.query_one("#no-match").display = not is_found
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def _sections(self) -> Iterable[tuple[str, Sequence[tuple[str, str]]]]:
        offered = [mode for mode in choosable().values() if not mode.for_comparison]
        compared = [(mode.name, mode.title) for mode in choosable().values() if mode.for_comparison]
        first = [(describe_keys(BY_ID[id], self._keys).split(" / ")[0], words) for id, words in FIRST_KEYS.items()]
        return (
            ("To begin with", first),
            ("Keys", key_rows(self._keys)),
            ("Commands", [(action.line, action.doc) for action in COMMANDS.values()]),
            ("KV modes", mode_rows(offered)),
            ("Methods of other papers, for comparison", compared),
            ("What the figures mean", figure_rows(offered)),
        )


def matching(typed: str, section: str, rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the rows of a section that contain every typed word, ignoring case, and the parents of indented rows.

    The names of its section and parent count as words of a row.
    """
    words, parent = typed.casefold().split(), ("", "")
    found: list[tuple[str, str]] = []
    for row in rows:
        parent = parent if row[0].startswith(" ") else row
        if all(word in f"{section} {parent[0]} {' '.join(row)}".casefold() for word in words):
            found += [row] if parent in (row, *found) else [parent, row]
    return found


def table(rows: Iterable[tuple[str, str]], color: Color) -> Table:
    """Return a table of two columns; text wraps in the second."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style=Style(color=color.rich_color))
    grid.add_column()
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def key_rows(rebound: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the current keys and what they do; ``rebound`` holds the changed keys by the id of their action."""
    return [(describe_keys(action, rebound), action.doc) for action in ACTIONS if keys_of(action, rebound)]


def figure_rows(modes: Sequence[type[ModeParameters]]) -> list[tuple[str, str]]:
    """Return the meanings of the figures, grouped by the part of the screen or the mode that shows them."""
    of_modes = {f"{mode.name} mode": mode.figures for mode in modes if mode.figures}
    others = {
        "status bar and receipts": STATUS,
        "receipts": RECEIPT,
        "comparisons": comparison.FIGURES,
        "/stats": SUMS,
        "/plan": PLANNED,
    }
    rows = []
    for title, figures in {**FIGURES, **of_modes, **others}.items():
        rows.append((title, ""))
        rows += [(f"  {visible(label)}", visible(text)) for label, text in figures.items()]
    return rows


def mode_rows(modes: Sequence[type[ModeParameters]]) -> list[tuple[str, str]]:
    rows = []
    for mode in modes:
        rows.append((mode.name, mode.title))
        rows += [(f"  {name}", field.description or "") for name, field in mode.model_fields.items()]
    return rows
