"""The panel columns: labeled numbers from one snapshot, the timeline, the last events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import MouseMove
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static

from kvchat.foreign_text import visible
from kvchat.protocol.figures import Snapshot
from kvchat.tui import panel_rows
from kvchat.tui.actions import bindings
from kvchat.tui.state import ChatState
from kvchat.tui.widgets.bars import Badges
from kvchat.tui.widgets.charts import Block, Chart, GpuHistoryPlot, HeadMap, RecallHistogram, labeled
from kvchat.tui.widgets.ribbon import CLASSES, GLYPHS
from kvchat.units import BARS, count

COLUMN_ROWS = 8
CALM = "calm"
STORED, MARK = "░", "▾"
AXIS = "tokens, oldest to newest"
MAX_POINTS = 2048
LABELED = 4  # rows from which on there is room to say how high the hills are
OF_PLOT = {STORED: "$ribbon-host", MARK: "$ribbon-tick"}
OF_LABEL = {STORED: "$ribbon-host", BARS[-1]: "$ribbon-device"}
MAX_EVENTS = 200
EVENT_LENGTH = 400  # characters; a library's error may be of any length


class Rowed(Block):
    """Label and value rows, values at the right edge."""

    rows: reactive[panel_rows.Rows] = reactive(list)
    chosen: reactive[int | None] = reactive(None)

    def __init__(self, title: str, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = f" {title} "
        self.mode = ""

    def explanation(self, place: int | None) -> str:
        """The meaning of the row at ``place``; "" where there is none."""
        if place is None or not 0 <= place < len(self.rows):
            return ""
        label = self.rows[place][0]
        return f"{label}: {panel_rows.explain(label, self.mode)}"

    def on_mouse_move(self, event: MouseMove) -> None:
        """The row under the mouse explains itself."""
        self.tooltip = visible(self.explanation(event.y - self.gutter.top)) or None

    def watch_rows(self) -> None:
        self.redraw()

    def lines(self, width: int) -> list[Content]:
        lines = [labeled(label, value, width) for label, value in self.rows]
        if self.chosen is not None and self.chosen < len(lines):
            lines[self.chosen] = lines[self.chosen].stylize("reverse")
        return lines


class ShowsFigures(VerticalScroll):
    """Tells when it is on the screen: only then are its figures asked for."""

    is_on_screen = False

    class Changed(Message):
        """It is on the screen from now on, or no longer."""

    def on_show(self) -> None:
        self.is_on_screen = True
        self.post_message(self.Changed())

    def on_hide(self) -> None:
        self.is_on_screen = False
        self.post_message(self.Changed())


class KvColumn(ShowsFigures):
    """Figures of the answer and the mode: tokens read and stored, the mode's own counts, fetching and memory.

    The timeline takes the lines that are left. The mode's own numbers stand in ``DetailColumn`` where that is shown.
    With the focus a cursor walks the rows of both columns, and the lines at the end say what the chosen one means.
    ``link_bytes_per_s`` is the link's measured rate, ``hint`` says below four plain figures how to see the others.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings("panels")

    DEFAULT_CSS = """
    KvColumn { width: 36; padding: 0 0 0 1; scrollbar-size-vertical: 1; }
    KvColumn > #own-rows { border-top: none; }
    KvColumn > #auto { display: none; height: auto; padding: 0 1; color: $text-muted; }
    KvColumn > #figures-hint { color: $text-muted; padding: 0 1; margin: 1 0 0 0; }
    KvColumn > Timeline { height: 1fr; min-height: 2; max-height: 6; margin: 0 1; }
    KvColumn > Timeline.empty { display: none; }
    KvColumn > #meaning { display: none; dock: bottom; height: auto; padding: 0 1; background: $panel; }
    KvColumn:focus > #meaning { display: block; }
    """

    def __init__(self, link_bytes_per_s: float | None = None, hint: str = "") -> None:
        super().__init__()
        self._link = link_bytes_per_s
        self._hint = hint
        self._chosen: Rowed | None = None

    def compose(self) -> ComposeResult:
        yield Badges()
        yield Static(id="auto", markup=False)
        yield Rowed("at a glance", id="plain-rows")
        yield Rowed("this answer", id="context-rows")
        yield Rowed("mode", id="mode-rows")
        yield Rowed("", id="own-rows")
        yield Timeline()
        yield Rowed("fetching", id="recall-rows")
        yield Rowed("memory", id="memory-rows")
        yield Static(self._hint, id="figures-hint", markup=False)
        yield Static(id="meaning", markup=False)

    def on_mount(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Show all labels without numbers, so that nothing jumps when the numbers come."""
        self.show(Snapshot("mode", {}, 0, 0, 0, 0, 0))
        for block in self.query(Rowed):
            block.rows = [(label, "–") for label, _ in block.rows]

    def show(self, s: Snapshot) -> None:
        for name, (title, rows) in panel_rows.blocks(s, self._link).items():
            block = self.query_one(f"#{name}-rows", Rowed)
            block.border_title, block.rows = Content(f" {title} "), rows  # a str would be markup
            block.set_class(not rows, "empty")
        self.query_one(Badges).badges = s.badges
        auto = self.query_one("#auto", Static)
        auto.display = bool(s.auto)
        auto.update(s.auto)
        self.query_one("#plain-rows", Rowed).rows = panel_rows.plain_rows(s)
        # "calm" is no news, and in freeze on a GPU the column has no line to spare for it.
        self.query_one("#own-rows", Rowed).rows = [
            row for row in panel_rows.extra_rows(s.extras) if row != ("recovery", CALM)
        ]
        timeline = self.query_one(Timeline)
        timeline.set_class(not s.total, "empty")
        if s.total:
            timeline.add(s.active, s.total)
        else:
            timeline.clear()
        for block in self.query(Rowed):
            block.mode = s.mode
        self._explain()

    def on_focus(self) -> None:
        self.action_choose(0)

    def on_blur(self) -> None:
        self._choose(None)

    def action_choose(self, step: int) -> None:
        places = [(block, row) for block in self.screen.query(Rowed) if block.size for row in range(len(block.rows))]
        if places:
            at = next((at for at, (block, row) in enumerate(places) if block.chosen == row), 0)
            self._choose(*places[max(0, min(at + step, len(places) - 1))])

    def _choose(self, chosen: Rowed | None, row: int | None = None) -> None:
        if self._chosen is not None:
            self._chosen.chosen = None
        self._chosen = chosen
        if chosen is not None:
            chosen.chosen = row
            chosen.scroll_visible(animate=False)
        self._explain()

    def _explain(self) -> None:
        """Say what the chosen row means, which may be another one by now."""
        text = visible(self._chosen.explanation(self._chosen.chosen)) if self._chosen else ""
        meaning = self.query_one("#meaning", Static)
        if text != meaning.content:  # an update is a new layout
            meaning.update(text)


class DetailColumn(ShowsFigures, can_focus=False):
    """The second column of large screens: the mode's own numbers, details, the ribbon's legend and the event log.

    It asks for details while it is on the screen.
    """

    DEFAULT_CSS = """
    DetailColumn { width: 42; padding: 0 0 0 1; scrollbar-size-vertical: 1; }
    DetailColumn > .block { height: auto; padding: 0 1; border-top: solid $foreground 15%; }
    DetailColumn > .block { border-title-color: $primary; }
    """

    def __init__(self, state: ChatState) -> None:
        super().__init__()
        self._state = state
        self._on_gpu = True

    def compose(self) -> ComposeResult:
        yield Rowed("this mode", id="extra-rows")
        yield HeadMap(self._state, max_rows=COLUMN_ROWS)
        yield RecallHistogram(self._state)
        yield GpuHistoryPlot(self._state)
        yield Static(legend(self._on_gpu), id="legend", classes="block")
        yield EventLog(id="events")

    def on_mount(self) -> None:
        self.query_one("#legend").border_title = " ribbon "
        self.query_one("#extra-rows", Rowed).display = False

    def show(self) -> None:
        s = self._state.snapshot
        own = self.query_one("#extra-rows", Rowed)
        own.mode, own.rows = (s.mode, panel_rows.extra_rows(s.extras)) if s else ("", [])
        own.display = bool(own.rows)
        for chart in self.query(Chart):
            chart.redraw()
        if (on_gpu := s is None or panel_rows.has_gpu(s)) != self._on_gpu:  # an update is a new layout
            self._on_gpu = on_gpu
            self.query_one("#legend", Static).update(legend(on_gpu))


def legend(on_gpu: bool) -> Content:
    """The legend of the ribbon: the glyphs of shares read, and the color and word of each state."""
    lines = [Content.assemble((f"{BARS[0]}{BARS[3]}{BARS[7]}", "$ribbon-device"), "  read by few, half, all heads")]
    for letter, word in panel_rows.state_words(on_gpu).items():
        lines.append(Content.assemble((f" {GLYPHS.get(letter, BARS[7])} ", f"$ribbon-{CLASSES[letter]}"), f"  {word}"))
    lines.append(Content.assemble((" ┃ ", "$ribbon-tick"), "  the mode changed"))
    return Content("\n").join(
        [*lines, Content.assemble(("░▒█", "$ribbon-device"), "  beside a message: how much of it is read")]
    )


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


class Timeline(Block):
    """From the first stored token at the left to the newest at the right, as high as what is stored."""

    DEFAULT_CSS = "Timeline { height: 6; border-top: none; padding: 0; }"

    ticks: reactive[tuple[int, ...]] = reactive(())

    def __init__(self) -> None:
        super().__init__()
        self.border_title = f" {panel_rows.READ_OF_STORED} "  # where there is room for a border
        self.points: list[Point] = []

    def add(self, read: float, stored: float) -> None:
        """Add a step; those with more stored tokens are forgotten, because the conversation was cut back."""
        while self.points and self.points[-1].stored >= stored:
            self.points.pop()
        self.points.append(Point(read, stored))
        if len(self.points) > MAX_POINTS:
            self.points = by_tokens(self.points, MAX_POINTS // 2)
        self.redraw()

    def clear(self) -> None:
        self.points = []
        self.redraw()

    def lines(self, width: int) -> list[Content]:
        if not self.points or not (height := self.content_size.height):
            return []
        points = by_tokens(self.points, width, self.ticks)
        columns = [column(point, points[-1].stored, height) for point in points]
        texts = labels(self.points[-1], columns)
        return [_line(glyphs, text) for glyphs, text in zip_longest(zip(*columns, strict=True), texts, fillvalue="")]


def _line(glyphs: Sequence[str], label: str) -> Content:
    """A row of the plot, with a label's letters where it is empty."""
    cells = [
        (glyph, OF_PLOT.get(glyph, "$ribbon-device")) if glyph != " " else (letter, OF_LABEL.get(letter, "$foreground"))
        for glyph, letter in zip(glyphs, label.ljust(len(glyphs)), strict=False)
    ]
    runs = groupby(cells, key=itemgetter(1))
    return Content.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))


class EventLog(Static, can_focus=False):
    """Grows with its lines; ``lines`` is another log's where it shows that one's."""

    DEFAULT_CSS = """
    EventLog { height: auto; padding: 0 1; border-top: solid $foreground 15%; border-title-color: $primary; }
    EventLog:focus { border-top: solid $primary; }
    """

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.lines: tuple[str, ...] = ()

    def on_mount(self) -> None:
        self.border_title = f" {panel_rows.EVENTS} "

    @property
    def explanation(self) -> str:
        return panel_rows.EXPLANATIONS[panel_rows.EVENTS]

    def add(self, text: str) -> None:
        """Put an event of now before the others."""
        line = text if len(text) <= EVENT_LENGTH else text[:EVENT_LENGTH] + "…"
        self.show((f"{time.strftime('%H:%M:%S')}  {line}", *self.lines[: MAX_EVENTS - 1]))

    def show(self, lines: Sequence[str]) -> None:
        if self.lines != tuple(lines):  # an update is a new layout
            self.lines = tuple(lines)
            self.update("\n".join(lines))
