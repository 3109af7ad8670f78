"""Tokens read and stored over time: the shaded hill is stored, the solid one is read by attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from kvchat.units import BARS

STORED, MARK = "░", "▾"
MAX_POINTS = 2048
NAMES = ("read", "stored", "mark")


@dataclass(frozen=True)
class Point:
    """One moment; ``switched`` where the mode changed since the point before."""

    read: float
    stored: float
    switched: bool = False


def thin(points: Sequence[Point], width: int) -> list[Point]:
    """At most ``width`` points, each the last of its group; a mark in a group survives."""
    if len(points) <= width:
        return list(points)
    edges = [column * len(points) // width for column in range(width + 1)]
    groups = [points[start:end] for start, end in pairwise(edges)]
    return [Point(group[-1].read, group[-1].stored, any(p.switched for p in group)) for group in groups]


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


class Timeline(Widget):
    """The newest point is at the right; older ones are squeezed together, so the whole conversation stays in sight."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"timeline--read", "timeline--stored", "timeline--mark"}
    DEFAULT_CSS = """
    Timeline { height: 6; }
    Timeline > .timeline--read { color: $ribbon-device; }
    Timeline > .timeline--stored { color: $ribbon-host; }
    Timeline > .timeline--mark { color: $ribbon-tick; }
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.points: list[Point] = []
        self._switched = False
        self._key: object = None
        self._columns: list[list[str]] = []

    def add(self, read: float, stored: float) -> None:
        """Add a point, unless nothing has changed."""
        if self.points and (self.points[-1].read, self.points[-1].stored) == (read, stored) and not self._switched:
            return
        self.points.append(Point(read, stored, self._switched))
        self._switched = False
        if len(self.points) > MAX_POINTS:
            self.points = thin(self.points, MAX_POINTS // 2)
        self.refresh()

    def mark(self) -> None:
        """Mark the next point: the mode changed."""
        self._switched = True

    def clear(self) -> None:
        """Show an empty timeline."""
        self.points, self._switched = [], False
        self.refresh()

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        styles = {name: base + self.get_component_rich_style(f"timeline--{name}", partial=True) for name in NAMES}
        strip = Strip([Segment(glyphs[y], styles[_name(glyphs[y])]) for glyphs in self._drawn()])
        return strip.simplify().adjust_cell_length(self.size.width, base)

    def _drawn(self) -> list[list[str]]:
        """Compute the columns once for all lines; kept until the points or the size change."""
        width, height = self.size
        key = (width, height, len(self.points), self.points[-1:])
        if key != self._key:
            points = thin(self.points, width)
            top = max((point.stored for point in points), default=0.0)
            self._key, self._columns = key, [column(point, top, height) for point in points] if top else []
        return self._columns


def _name(glyph: str) -> str:
    return {STORED: "stored", MARK: "mark", " ": "stored"}.get(glyph, "read")
