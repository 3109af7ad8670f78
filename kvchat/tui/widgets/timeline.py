"""Tokens read over tokens stored: the shaded hill is stored, the solid one is read by attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvchat.tui.panel_rows import READ_OF_STORED
from kvchat.units import BARS, count

STORED, MARK = "░", "▾"
AXIS = "tokens, oldest to newest"
MAX_POINTS = 2048
LABELED = 4  # rows from which on there is room to say how high the hills are
NAMES = ("read", "stored", "mark", "label")


@dataclass(frozen=True)
class Point:
    """A step with ``stored`` tokens, of which it ``read`` some; ``switched`` where the mode changed on its way."""

    read: float
    stored: float
    switched: bool = False


def by_tokens(points: Sequence[Point], width: int, ticks: Sequence[int] = ()) -> list[Point]:
    """One point for each of ``width`` equal ranges of stored tokens, up to the last point's.

    A range without a step of its own has what the last step before it read; before the first step nothing was read.
    The mode changed in those in which ``ticks`` are, numbers of stored tokens.
    """
    total = points[-1].stored if points else 0.0
    columns, place, read = [], 0, 0.0
    for column in range(width if total else 0):
        begin, stored = total * column / width, total * (column + 1) / width
        while place < len(points) and points[place].stored <= stored:
            read = points[place].read
            place += 1
        columns.append(Point(min(read, stored), stored, any(begin < tick <= stored for tick in ticks)))
    return columns


def column(point: Point, top: float, height: int) -> list[str]:
    """The glyphs of one column, from the top row down; the top row is for the marks alone."""
    read, stored = (value / top * (height - 1) for value in (point.read, point.stored))
    rows = [MARK if point.switched else " "]
    for row in reversed(range(height - 1)):
        level = min(max(read - row, 0.0), 1.0)
        if level >= 1 / 16:
            rows.append(BARS[max(round(level * 8) - 1, 0)])
        elif stored - row >= 0.5 or (row == 0 and stored > 0):
            rows.append(STORED)
        else:
            rows.append(" ")
    return rows


def labels(point: Point, columns: Sequence[Sequence[str]]) -> list[str]:
    """Labels of the axes, above the hill where it is still low, and of the two tops of the newest step.

    That of the axis stands in the row of the marks, and gives way to one.
    """
    marks = "".join(column[0] for column in columns[: len(AXIS)])
    tops = [f"{STORED} {count(point.stored)} stored", f"{BARS[-1]} {count(point.read)} read"]
    return ["" if MARK in marks else AXIS, *(tops if len(columns[0]) >= LABELED else [])]


class Timeline(Widget):
    """From the first stored token at the left to the newest at the right, as high as what is stored."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"timeline--{name}" for name in NAMES}
    DEFAULT_CSS = """
    Timeline { height: 6; }
    Timeline > .timeline--read { color: $ribbon-device; }
    Timeline > .timeline--stored { color: $ribbon-host; }
    Timeline > .timeline--mark { color: $ribbon-tick; }
    Timeline > .timeline--label { color: $foreground 70%; }
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = f" {READ_OF_STORED} "  # where there is room for a border
        self.points: list[Point] = []
        self.ticks: tuple[int, ...] = ()
        self._key: object = None
        self._rows: list[tuple[str, str]] = []  # the glyphs of each, and its label

    def add(self, read: float, stored: float) -> None:
        """Add a step; those with more stored tokens are forgotten, because the conversation was cut back."""
        while self.points and self.points[-1].stored >= stored:
            self.points.pop()
        self.points.append(Point(read, stored))
        if len(self.points) > MAX_POINTS:
            self.points = by_tokens(self.points, MAX_POINTS // 2)
        before, now = self._rows, self._drawn()
        changed = [y for y, row in enumerate(now) if row != (before[y] if y < len(before) else None)]
        if changed:  # ten times a second, of up to forty rows
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def clear(self) -> None:
        """Show an empty timeline."""
        self.points = []
        self.refresh()

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        styles = {name: base + self.get_component_rich_style(f"timeline--{name}", partial=True) for name in NAMES}
        rows = self._drawn()
        glyphs, label = rows[y] if y < len(rows) else ("", "")
        letters = label.ljust(len(glyphs))
        strip = Strip([_segment(glyph, letter, styles) for glyph, letter in zip(glyphs, letters, strict=False)])
        return strip.simplify().adjust_cell_length(self.size.width, base)

    def _drawn(self) -> list[tuple[str, str]]:
        """Compute the rows once for all; kept until the points or the size change."""
        width, height = self.size
        key = (width, height, len(self.points), self.points[-1:], self.ticks)
        if key != self._key:
            points = by_tokens(self.points, width, self.ticks)
            top = points[-1].stored if points else 0.0
            columns = [column(point, top, height) for point in points]
            texts = labels(self.points[-1], columns) if columns else []
            texts += [""] * (height - len(texts))
            glyphs = map("".join, zip(*columns, strict=True))
            self._key, self._rows = key, [*zip(glyphs, texts, strict=False)]
        return self._rows


def _segment(glyph: str, letter: str, styles: Mapping[str, Style]) -> Segment:
    """The segment of a cell: a label's letter where the plot is empty."""
    if glyph != " ":
        return Segment(glyph, styles[{STORED: "stored", MARK: "mark"}.get(glyph, "read")])
    return Segment(letter, styles[{STORED: "stored", BARS[-1]: "read"}.get(letter, "label")])
