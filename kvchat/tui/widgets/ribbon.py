"""The KV ribbon: the whole stored context on one line, a glyph and a color for where each part of it is.

Drawn by the Line API: 3.5 ms a frame where markup needs 45 ms.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from kvchat.protocol.figures import RIBBON, Snapshot
from kvchat.tui.actions import bindings
from kvchat.units import count, short

GLYPHS = {"S": "▓", "W": "▒", "D": "█", "R": "▲", "H": "░", "F": "·", "X": "╌"}
CLASSES = {"S": "sink", "W": "window", "D": "device", "R": "recalled", "H": "host", "F": "host", "X": "lost"}
TICK = "┃"
UNKNOWN = "?"
LABEL = " KV "
MAX_TICKS = 64


def squeeze(cells: str, width: int) -> str:
    """``cells`` in at most ``width`` letters: the most common of each group, but what is recalled, sink or window wins.

    Those are few and would vanish among thousands of others.
    """
    if len(cells) <= width:
        return cells
    edges = [column * len(cells) // width for column in range(width + 1)]
    return "".join(_common(cells[start:end]) for start, end in pairwise(edges))


def columns_of(position: int, cell_tokens: int, cells: int, width: int) -> int:
    """The column that shows the token at ``position``."""
    cell = min(position // cell_tokens, max(cells - 1, 0))
    return cell if cells <= width else min(cell * width // cells, width - 1)


def tokens_of(column: int, cell_tokens: int, cells: int, width: int, total: int) -> tuple[int, int]:
    """The range of token positions that one column shows."""
    shown = min(cells, width)
    if not shown:
        return 0, 0
    start, end = (edge * cells // shown * cell_tokens for edge in (column, column + 1))
    return start, min(end, total)


def _common(group: str) -> str:
    rare = next((letter for letter in "RSW" if letter in group), "")
    return rare or Counter(group).most_common(1)[0][0]


@dataclass(frozen=True)
class Tick:
    """The mode changed when ``position`` tokens were stored."""

    position: int
    mode: str


class Ribbon(Widget, can_focus=True):
    """One line, two when focused: then a cursor walks the columns and the second line shows their text."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"ribbon--{name}" for name in (*CLASSES.values(), "tick", "label", "text")}
    DEFAULT_CSS = """
    Ribbon { height: 1; background: $panel; }
    Ribbon:focus { height: 2; }
    Ribbon > .ribbon--sink { color: $ribbon-sink; }
    Ribbon > .ribbon--window { color: $ribbon-window; }
    Ribbon > .ribbon--device { color: $ribbon-device; }
    Ribbon > .ribbon--recalled { color: $ribbon-recalled; text-style: bold; }
    Ribbon > .ribbon--host { color: $ribbon-host; }
    Ribbon > .ribbon--lost { color: $ribbon-lost; }
    Ribbon > .ribbon--tick { color: $ribbon-tick; text-style: bold; }
    Ribbon > .ribbon--label { color: $foreground 70%; text-style: bold; }
    Ribbon > .ribbon--text { color: $foreground; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("ribbon")

    snapshot: reactive[Snapshot | None] = reactive(None)
    cursor: reactive[int] = reactive(0)
    page_text: reactive[str] = reactive("")

    @dataclass
    class Looked(Message):
        """The cursor is on these tokens; the receiver answers with ``show_text``."""

        start: int
        end: int

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.ticks: list[Tick] = []

    def mark(self, position: int, mode: str) -> None:
        """Remember that the mode changed here."""
        self.ticks = [*self.ticks, Tick(position, mode)][-MAX_TICKS:]
        self.refresh()

    def clear(self) -> None:
        """Show an empty ribbon."""
        self.ticks, self.page_text, self.cursor, self.snapshot = [], "", 0, None

    def show_text(self, start: int, text: str) -> None:
        """Show the text asked for by ``Looked``; dropped when the cursor has moved on."""
        if start == self._range()[0]:
            self.page_text = text

    def action_move(self, step: int) -> None:
        """Walk the cursor and ask for the text under it."""
        self.cursor = max(0, min(self.cursor + step, self._shown() - 1))
        self._look()

    def on_focus(self) -> None:
        self.action_move(0)

    def render_line(self, y: int) -> Strip:
        """Line 0 is the ribbon, line 1 the text under the cursor."""
        strip = self._cells_line() if y == 0 else self._text_line()
        return strip.adjust_cell_length(self.size.width, self.rich_style)

    def _look(self) -> None:
        start, end = self._range()
        if end > start:
            self.post_message(self.Looked(start, end))

    def _caption(self) -> str:
        snapshot = self.snapshot
        return f" {short(snapshot.active)}/{short(snapshot.total)} " if snapshot else " 0/0 "

    def _width(self) -> int:
        return max(self.size.width - len(LABEL) - max(len(self._caption()), 12), 1)

    def _shown(self) -> int:
        return min(len(self.snapshot.ribbon), self._width()) if self.snapshot else 0

    def _range(self) -> tuple[int, int]:
        s = self.snapshot
        return tokens_of(self.cursor, s.cell_tokens, len(s.ribbon), self._width(), s.total) if s else (0, 0)

    def _cells_line(self) -> Strip:
        width, base = self._width(), self.rich_style
        letters = squeeze(self.snapshot.ribbon, width) if self.snapshot else ""
        styles = {letter: base + self._style(name) for letter, name in CLASSES.items()}
        cells = [Segment(GLYPHS.get(letter, UNKNOWN), styles.get(letter, base)) for letter in letters]
        for column in self._tick_columns(width):
            if column < len(cells):
                cells[column] = Segment(TICK, base + self._style("tick"))
        if self.has_focus and self.cursor < len(cells):
            cell = cells[self.cursor]
            cells[self.cursor] = Segment(cell.text, (cell.style or base) + Style(reverse=True))
        label, caption = base + self._style("label"), base + self._style("text")
        blank = self.size.width - len(LABEL) - len(cells) - len(self._caption())
        rest = Segment(" " * max(blank, 0), base)
        return Strip([Segment(LABEL, label), *cells, rest, Segment(self._caption(), caption)]).simplify()

    def _text_line(self) -> Strip:
        start, end = self._range()
        letter = self.snapshot.ribbon[start // self.snapshot.cell_tokens] if self.snapshot and end > start else ""
        where = f" {count(start)}–{count(end - 1)} {RIBBON.get(letter, UNKNOWN)}  " if letter else " nothing stored yet"
        text = " ".join(self.page_text.split())[: self.size.width]
        base = self.rich_style
        return Strip([Segment(where, base + self._style("label")), Segment(text, base + self._style("text"))])

    def _tick_columns(self, width: int) -> list[int]:
        s = self.snapshot
        if s is None:
            return []
        ticks = [tick for tick in self.ticks if tick.position <= s.total]  # what was truncated has none
        return [columns_of(tick.position, s.cell_tokens, len(s.ribbon), width) for tick in ticks]

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"ribbon--{name}", partial=True)
