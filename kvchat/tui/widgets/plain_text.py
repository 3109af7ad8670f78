"""A long plain text as one widget: a layout only counts its rows, and only the rows on the screen are drawn.

Textual's own wrapping takes a third of a second for a megabyte, at each new width and in one step.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget


class PlainText(Widget):
    """Plain text, wrapped at words, which can be selected."""

    DEFAULT_CSS = "PlainText { width: 1fr; height: auto; }"

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._lines = _lines(text)
        self._ends: list[int] = []  # of each line, in rows
        self._width = 0

    @property
    def text(self) -> str:
        """All of it, with spaces for tabs."""
        return "\n".join(self._lines)

    def show(self, text: str) -> None:
        """Show another text."""
        self._lines, self._width = _lines(text), 0
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Rows at a width in cells."""
        self._wrap(width)
        return self._ends[-1] if self._ends else 0

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """Cells of the longest line."""
        return max(map(cell_len, self._lines), default=0)

    def render_line(self, y: int) -> Strip:
        """A row; every character knows its place in the text, for the selection."""
        width, style = self.size.width, self.rich_style
        self._wrap(width)
        number = bisect_right(self._ends, y)
        if not width or number == len(self._lines):
            return Strip.blank(width, style)
        line = self._lines[number]
        start, end = _rows(line, width)[y - (self._ends[number - 1] if number else 0)]
        pieces = [(line[start:end], style)]
        span = self.text_selection.get_span(number) if self.text_selection else None
        if span is not None:
            first, last = (min(max(place, start), end) for place in (span[0], span[1] if span[1] >= 0 else end))
            chosen = style + self.screen.get_component_rich_style("screen--selection")
            pieces = [(line[start:first], style), (line[first:last], chosen), (line[last:end], style)]
        strip = Strip([Segment(text, style) for text, style in pieces if text])
        return strip.apply_offsets(start, number).adjust_cell_length(width, style)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """The selected text, and what follows it."""
        return selection.extract(self.text), "\n"

    def _wrap(self, width: int) -> None:
        if width and width != self._width:
            self._ends = list(accumulate(_height(line, width) for line in self._lines))
            self._width = width


def _lines(text: str) -> list[str]:
    return text.expandtabs().split("\n") if text else []


def _height(line: str, width: int) -> int:
    return 1 if 2 * len(line) <= width else len(_rows(line, width))


@lru_cache(maxsize=64)
def _rows(line: str, width: int) -> list[tuple[int, int]]:
    """First and last character of each row of a line; where some are not one cell wide, rows are half full."""
    size = cell_len(line)
    if size <= width:
        return [(0, len(line))]
    most = width if size == len(line) else max(width // 2, 1)
    return [match.span(1) for match in _row_of(most).finditer(line)]


@lru_cache
def _row_of(most: int) -> re.Pattern[str]:
    """The longest run of characters that ends at a space, or as many as there is room for."""
    return re.compile(rf"(.{{1,{most}}}(?=\s|$)|.{{1,{most}}})\s*", re.DOTALL)
