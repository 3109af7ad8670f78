"""The transcript's gutter: beside each message how much of it the model still reads, in the ribbon's colors.

It lies over the messages' margin and is drawn by the Line API: a new snapshot repaints one column and lays nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from rich.segment import Segment
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvchat.tui.visibility import Mark
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.ribbon import CLASSES, GLYPHS

MarkOf = Callable[[str], Mark | None]
SHADES = "░▒▓█"
BLANK = " "


def shade(mark: Mark) -> str:
    """The glyph of a message: the fuller, the more of it is read."""
    if mark.share <= 0:
        return GLYPHS.get(mark.letter, GLYPHS["H"])
    return SHADES[min(int(mark.share * len(SHADES)), len(SHADES) - 1)]


class Gutter(Widget):
    """One column at the left edge of a transcript, which says by ``places`` where its messages are."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"gutter--{name}" for name in CLASSES.values()}
    DEFAULT_CSS = """
    Gutter { width: 1; height: 1fr; dock: left; layer: above; background: $background; }
    Gutter > .gutter--sink { color: $ribbon-sink; }
    Gutter > .gutter--window { color: $ribbon-window; }
    Gutter > .gutter--device { color: $ribbon-device; }
    Gutter > .gutter--recalled { color: $ribbon-recalled; }
    Gutter > .gutter--host { color: $ribbon-host; }
    Gutter > .gutter--lost { color: $ribbon-lost; }
    """

    def __init__(
        self, transcript: VerticalScroll, places: Callable[[], Iterable[tuple[Question | Answer, Region]]]
    ) -> None:
        super().__init__()
        self._transcript, self._places = transcript, places
        self._mark_of: MarkOf | None = None
        self._rows: list[Mark | None] = []

    def on_mount(self) -> None:
        for name in ("scroll_y", "virtual_size"):
            self.watch(self._transcript, name, self._draw, init=False)
        # Messages of a transcript that is not full yet move without either of them.
        self.screen.screen_layout_refresh_signal.subscribe(self, lambda _: self._draw())

    def on_resize(self) -> None:
        """As high as it is now: while a prompt is read no snapshot comes that would draw it again."""
        self._draw()

    def show(self, mark_of: MarkOf | None) -> None:
        """Show what is read of each message, by its id; asked for those in sight, None for none."""
        self._mark_of = mark_of
        self._draw()

    def _draw(self) -> None:
        rows: list[Mark | None] = [None] * self.size.height
        top, mark_of = round(self._transcript.scroll_y), self._mark_of
        for message, place in self._places() if mark_of else ():
            first, end = max(place.y - top, 0), min(place.bottom - top, len(rows))
            if first < end and mark_of:
                rows[first:end] = [mark_of(message.message)] * (end - first)
        if rows != self._rows:
            self._rows = rows
            self.refresh()

    def render_line(self, y: int) -> Strip:
        mark = self._rows[y] if y < len(self._rows) else None
        base = self.rich_style
        if mark is None:
            return Strip([Segment(BLANK, base)])
        style = self.get_component_rich_style(f"gutter--{CLASSES.get(mark.letter, 'host')}", partial=True)
        return Strip([Segment(shade(mark), base + style)])
