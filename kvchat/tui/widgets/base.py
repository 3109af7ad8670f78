"""Building blocks of the widgets: long plain texts, workers, timers, and drawing at a limited rate.

A key typed during a layout waits for its end, and with 500 messages a layout takes tens of milliseconds. So drawing
rests between layouts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache, partial
from itertools import accumulate
from time import thread_time
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from textual.dom import DOMNode
from textual.geometry import Size
from textual.message_pump import MessagePump
from textual.selection import Selection
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

SHORTEST_S, LONGEST_S = 0.05, 0.4  # from one drawing to the next


class PlainText(Widget):
    """Selectable plain text, wrapped at words."""

    DEFAULT_CSS = "PlainText { width: 1fr; height: auto; }"

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._lines = _lines(text)
        self._ends: list[int] = []  # the row after the last one of each line
        self._width = 0

    @property
    def text(self) -> str:
        """The whole text, with tabs expanded to spaces."""
        return "\n".join(self._lines)

    def show(self, text: str) -> None:
        self._lines, self._width = _lines(text), 0
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._wrap(width)
        return self._ends[-1] if self._ends else 0

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return max(map(cell_len, self._lines), default=0)

    def render_line(self, y: int) -> Strip:
        """Return a row, with each character's offset in the text, which selecting needs."""
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
            first, last = (min(max(offset, start), end) for offset in (span[0], span[1] if span[1] >= 0 else end))
            chosen = style + self.screen.get_component_rich_style("screen--selection")
            pieces = [(line[start:first], style), (line[first:last], chosen), (line[last:end], style)]
        strip = Strip([Segment(text, style) for text, style in pieces if text])
        return strip.apply_offsets(start, number).adjust_cell_length(width, style)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        return selection.extract(self.text), "\n"

    def _wrap(self, width: int) -> None:
        if width and width != self._width:
            heights = (1 if 2 * len(line) <= width else len(_rows(line, width)) for line in self._lines)
            self._ends = list(accumulate(heights))
            self._width = width


def _lines(text: str) -> list[str]:
    return text.expandtabs().split("\n") if text else []


@lru_cache(maxsize=64)
def _rows(line: str, width: int) -> list[tuple[int, int]]:
    """Return start and end of each row of a line, in characters; rows with wide characters hold half as many."""
    size = cell_len(line)
    if size <= width:
        return [(0, len(line))]
    most = width if size == len(line) else max(width // 2, 1)
    # A row is the longest run of characters that fits and ends before a space, or else as many as fit.
    rows = re.finditer(rf"(.{{1,{most}}}(?=\s|$)|.{{1,{most}}})\s*", line, re.DOTALL)
    return [match.span(1) for match in rows]


def run_worker(
    node: DOMNode, work: Callable[[], Coroutine[Any, Any, object]], group: str = "default", exclusive: bool = False
) -> None:
    """Run a coroutine function as a worker of ``node``; an ``exclusive`` one cancels the others of its ``group``.

    ``work`` is a function, because a coroutine whose worker is canceled before its first step would never be awaited.
    """
    node.run_worker(work, group=group, exclusive=exclusive)  # type: ignore[arg-type]  # Textual's type is too narrow


def unskipped(timer: Timer) -> Timer:
    """Make a new timer fire late rather than never.

    Textual skips a tick that is due before the timer waits for it. A one-shot timer would then never fire if the
    process stalled for that long, and a resize or a growing answer would not be drawn.
    """
    timer._skip = False
    return timer


def interval(cost_s: float) -> float:
    """Return the seconds to rest after a drawing that computed for ``cost_s``: four times as long, within bounds."""
    return min(max(4 * cost_s, SHORTEST_S), LONGEST_S)


class Paced:
    """Calls ``draw`` once for all requests since the last call, with rests between calls."""

    def __init__(self, pump: MessagePump, draw: Callable[[], Awaitable[None]]) -> None:
        self._pump, self._draw = pump, draw
        self._is_requested = self._is_running = False

    def request(self) -> None:
        """Draw soon."""
        self._is_requested = True
        if not self._is_running:
            self._is_running = True
            self._after(SHORTEST_S, self._work)

    async def _work(self) -> None:
        self._is_running = self._is_requested
        if self._is_requested:
            self._is_requested, begun = False, thread_time()
            await self._draw()
            # By then the layout and its drawing are done, which cost more than the update that caused them.
            self._after(SHORTEST_S, partial(self._rest, begun))

    def _rest(self, begun: float) -> None:
        rest = interval(thread_time() - begun) - SHORTEST_S
        self._after(max(rest, 0.001), self._work)

    def _after(self, seconds: float, work: Callable[[], Awaitable[None] | None]) -> None:
        unskipped(self._pump.set_timer(seconds, work))
