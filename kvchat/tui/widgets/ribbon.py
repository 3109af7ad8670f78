"""The KV ribbon: all stored tokens on one line, divided into parts whose height is the share that was read.

It is the share of layers, KV heads and tokens that the last step attended to; the color says where the part is stored.
Textual's line API draws a frame in 3.5 ms, markup in 45 ms.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import BindingType
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from kvchat.conversations.conversation import MARK as TICK
from kvchat.protocol.figures import Snapshot
from kvchat.tui.actions import bindings
from kvchat.tui.panel_rows import has_gpu, state_words
from kvchat.units import BARS, count, short

GLYPHS = {"R": "▲", "P": "◆", "H": "·", "F": "~", "X": "×"}  # for R and P always, for the others if nothing is read
CLASSES = {
    "S": "sink",
    "P": "sink",
    "W": "window",
    "D": "device",
    "R": "recalled",
    "H": "host",
    "F": "host",
    "X": "lost",
}
LABEL = " KV "


def squeeze(cells: str, width: int) -> str:
    """Return ``cells`` in at most ``width`` letters, the most common one of each group.

    Recalled, pinned, sink and window cells win over others, because they are few and would vanish.
    """
    if len(cells) <= width:
        return cells
    edges = [column * len(cells) // width for column in range(width + 1)]
    return "".join(_common(cells[start:end]) for start, end in pairwise(edges))


def mean_shares(digits: str, width: int) -> list[int]:
    """Return the mean read share, 0 to 9, of each group of ``squeeze``."""
    shown = min(len(digits), width)
    edges = [part * len(digits) // shown for part in range(shown + 1)] if shown else []
    return [round(sum(map(_tenths, digits[start:end])) / (end - start)) for start, end in pairwise(edges)]


def glyph(letter: str, share: int) -> str:
    """Return the glyph of a part in the state ``letter``; ``share`` is the read share as a digit, 0 to 9."""
    if letter in "RP" or (not share and letter in GLYPHS):
        return GLYPHS[letter]
    return BARS[max(round((share + 0.5) * len(BARS) / 10) - 1, 0)]


def part_of(position: int, cell_tokens: int, cells: int, width: int) -> int:
    """Return the part that shows the token at ``position``: a cell, or a group of cells if not all fit in ``width``."""
    cell = min(position // cell_tokens, max(cells - 1, 0))
    return cell if cells <= width else min(cell * width // cells, width - 1)


def part_at(column: int, parts: int, width: int) -> int:
    """Return which of ``parts`` is drawn at a column of ``width``."""
    return ((column + 1) * parts - 1) // width


def tokens_of(part: int, cell_tokens: int, cells: int, width: int, total: int) -> tuple[int, int]:
    """Return start and end of the token positions that a part shows."""
    shown = min(cells, width)
    if not shown:
        return 0, 0
    start, end = (edge * cells // shown * cell_tokens for edge in (part, part + 1))
    return start, min(end, total)


def _tenths(digit: str) -> int:
    return int(digit) if digit.isdecimal() else 0


def _common(group: str) -> str:
    rare = next((letter for letter in "RPSW" if letter in group), "")
    return rare or Counter(group).most_common(1)[0][0]


class Ribbon(Widget, can_focus=True):
    """The ribbon; while it has the focus, a cursor moves over its parts, with their text and a legend below.

    ``ticks`` are the numbers of stored tokens at which the mode changed.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"ribbon--{name}" for name in (*CLASSES.values(), "tick", "label", "text")}
    DEFAULT_CSS = """
    Ribbon { height: 1; background: $panel; }
    Ribbon:focus { height: 3; }
    Ribbon > .ribbon--recalled { text-style: bold; }
    Ribbon > .ribbon--tick { color: $ribbon-tick; text-style: bold; }
    Ribbon > .ribbon--label { color: $foreground 70%; text-style: bold; }
    Ribbon > .ribbon--text { color: $foreground; }
    """ + "".join(f"Ribbon > .ribbon--{name} {{ color: $ribbon-{name}; }}" for name in dict.fromkeys(CLASSES.values()))
    BINDINGS: ClassVar[list[BindingType]] = bindings("ribbon")

    snapshot: reactive[Snapshot | None] = reactive(None)
    cursor: reactive[int] = reactive(0)
    page_text: reactive[str] = reactive("")
    ticks: reactive[tuple[int, ...]] = reactive(())

    @dataclass
    class CursorMoved(Message):
        """The cursor has moved to these tokens; the receiver answers with ``show_text``."""

        start: int
        end: int

    @dataclass
    class Picked(Message):
        """The user wants to see the message that this token belongs to."""

        position: int

    def clear(self) -> None:
        self.page_text, self.cursor, self.snapshot = "", 0, None

    def show_text(self, start: int, text: str) -> None:
        """Show the text under the cursor, unless the cursor has moved on since it was requested."""
        if start == self._range()[0]:
            self.page_text = text

    def action_move(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, self._shown() - 1))
        start, end = self._range()
        if end > start:
            self.post_message(self.CursorMoved(start, end))

    def action_pick(self) -> None:
        """Post ``Picked`` with the middle token under the cursor."""
        start, end = self._range()
        if end > start:
            self.post_message(self.Picked((start + end) // 2))

    def on_click(self, event: Click) -> None:
        """Pick the part in this column, whatever the row: gaining the focus moves the lines of the widget."""
        column, parts, width = event.x - len(LABEL), self._shown(), self._width()
        if parts and 0 <= column < width:
            self.cursor = part_at(column, parts, width)
            self.action_pick()

    def on_focus(self) -> None:
        self.action_move(0)

    def render_line(self, y: int) -> Strip:
        """Render line 0, the ribbon, line 1, the text under the cursor, or line 2, the legend."""
        strip = (self._cells_line, self._text_line, self._legend_line)[y]()
        return strip.adjust_cell_length(self.size.width, self.rich_style)

    def _caption(self) -> str:
        snapshot = self.snapshot
        return f" {short(snapshot.active)}/{short(snapshot.total)} " if snapshot and snapshot.total else " empty "

    def _width(self) -> int:
        return max(self.size.width - len(LABEL) - max(len(self._caption()), 12), 1)

    def _shown(self) -> int:
        return min(len(self.snapshot.ribbon), self._width()) if self.snapshot else 0

    def _range(self) -> tuple[int, int]:
        s = self.snapshot
        return tokens_of(self.cursor, s.cell_tokens, len(s.ribbon), self._width(), s.total) if s else (0, 0)

    def _cells_line(self) -> Strip:
        width, base = self._width(), self.rich_style
        parts = self._parts(width)
        edges = [part * width // len(parts) for part in range(len(parts) + 1)] if parts else [0]
        cells = [part for part, (start, end) in zip(parts, pairwise(edges), strict=True) for _ in range(start, end)]
        if (s := self.snapshot) is not None and s.ribbon:
            for tick in self.ticks:
                if tick <= s.total:  # later ones were in tokens truncated since
                    column = edges[part_of(tick, s.cell_tokens, len(s.ribbon), width)]
                    cells[column] = Segment(TICK, base + self._style("tick"))
        if self.has_focus and self.cursor < len(parts):
            for column in range(edges[self.cursor], edges[self.cursor + 1]):
                cell = cells[column]
                cells[column] = Segment(cell.text, (cell.style or base) + Style(reverse=True))
        label, caption = base + self._style("label"), base + self._style("text")
        blank = self.size.width - len(LABEL) - len(cells) - len(self._caption())
        rest = Segment(" " * max(blank, 0), base)
        return Strip([Segment(LABEL, label), *cells, rest, Segment(self._caption(), caption)]).simplify()

    def _parts(self, width: int) -> list[Segment]:
        s, base = self.snapshot, self.rich_style
        if s is None:
            return []
        styles = {letter: base + self._style(name) for letter, name in CLASSES.items()}
        digits = s.attended[: len(s.ribbon)].ljust(len(s.ribbon), "0")
        shown = zip(squeeze(s.ribbon, width), mean_shares(digits, width), strict=True)
        return [Segment(glyph(letter, share), styles.get(letter, base)) for letter, share in shown]

    def _text_line(self) -> Strip:
        start, end = self._range()
        where = " nothing stored yet"
        if self.snapshot and end > start:
            cell = start // self.snapshot.cell_tokens
            state = self._words().get(self.snapshot.ribbon[cell], "?")
            share = _tenths(self.snapshot.attended[cell : cell + 1])
            read = "not read" if not share else "read by all heads" if share == 9 else f"read by {10 * share} %"
            where = f" {count(start)}–{count(end - 1)} {state}, {read}  "
        text = " ".join(self.page_text.split())[: self.size.width]
        base = self.rich_style
        return Strip([Segment(where, base + self._style("label")), Segment(text, base + self._style("text"))])

    def _legend_line(self) -> Strip:
        """Return the meanings of the glyphs and colors now on the ribbon, as many as fit."""
        letters = self.snapshot.ribbon if self.snapshot else ""
        words = [(GLYPHS.get(of, BARS[7]), CLASSES[of], word) for of, word in self._words().items() if of in letters]
        if self.ticks:
            words.append((TICK, "tick", "the mode changed"))
        words.append((f"{BARS[0]}{BARS[3]}{BARS[7]}", "device", "read by few, half, all heads"))
        base, segments = self.rich_style, [Segment("", self.rich_style)]
        for glyphs, name, word in words:
            entry = [Segment(f" {glyphs}", base + self._style(name)), Segment(f" {word} ", base + self._style("label"))]
            if Segment.get_line_length([*segments, *entry]) <= self.size.width:
                segments += entry
        return Strip(segments)

    def _words(self) -> dict[str, str]:
        return state_words(self.snapshot is None or has_gpu(self.snapshot))

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"ribbon--{name}", partial=True)
