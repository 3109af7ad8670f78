"""The columns of panels: labeled figures of a snapshot, the timeline, the event log."""

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
AXIS_LABEL = "tokens, oldest to newest"
MAX_POINTS = 2048
LABELED_HEIGHT = 4  # rows of the plot from which it labels the counts too
PLOT_STYLES = {STORED: "$ribbon-host", MARK: "$ribbon-tick"}
LABEL_STYLES = {STORED: "$ribbon-host", BARS[-1]: "$ribbon-device"}
MAX_EVENTS = 200
EVENT_LENGTH = 400  # characters; a library's error may have any length


class LabeledRows(Block):
    """A block of rows with a label at the left and a value at the right."""

    rows: reactive[panel_rows.Rows] = reactive(list)
    chosen: reactive[int | None] = reactive(None)

    def __init__(self, title: str, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = f" {title} "
        self.mode = ""

    def explanation(self, row: int | None) -> str:
        """Return the meaning of the row with index ``row``; "" if there is none."""
        if row is None or not 0 <= row < len(self.rows):
            return ""
        label = self.rows[row][0]
        return f"{label}: {panel_rows.explain(label, self.mode)}"

    def on_mouse_move(self, event: MouseMove) -> None:
        """Show the meaning of the row under the mouse as its tooltip."""
        self.tooltip = visible(self.explanation(event.y - self.gutter.top)) or None

    def watch_rows(self) -> None:
        self.redraw()

    def lines(self, width: int) -> list[Content]:
        lines = [labeled(label, value, width) for label, value in self.rows]
        if self.chosen is not None and self.chosen < len(lines):
            lines[self.chosen] = lines[self.chosen].stylize("reverse")
        return lines


class FigureColumn(VerticalScroll):
    """A column that reports when it becomes visible or hidden: its figures are requested only while it is visible."""

    is_on_screen = False

    class Changed(Message):
        """``is_on_screen`` has changed."""

    def on_show(self) -> None:
        self.is_on_screen = True
        self.post_message(self.Changed())

    def on_hide(self) -> None:
        self.is_on_screen = False
        self.post_message(self.Changed())


class KvColumn(FigureColumn):
    """Figures of the answer and the mode: tokens read and stored, the mode's own figures, fetching and memory.

    The timeline takes the remaining lines. The mode's own figures move to ``DetailColumn`` if that is visible. While
    this column has the focus a cursor moves over the rows of both, and the last lines explain the row under it.
    ``link_bytes_per_s`` is the link's measured rate; ``hint``, below the four plain figures, says how to see all.
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
        self._chosen: LabeledRows | None = None

    def compose(self) -> ComposeResult:
        yield Badges()
        yield Static(id="auto", markup=False)
        yield LabeledRows("at a glance", id="plain-rows")
        yield LabeledRows("this answer", id="context-rows")
        yield LabeledRows("mode", id="mode-rows")
        yield LabeledRows("", id="own-rows")
        yield Timeline()
        yield LabeledRows("fetching", id="recall-rows")
        yield LabeledRows("memory", id="memory-rows")
        yield Static(self._hint, id="figures-hint", markup=False)
        yield Static(id="meaning", markup=False)

    def on_mount(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Show all labels without values, so that nothing moves when the first values arrive."""
        self.show(Snapshot("mode", {}, 0, 0, 0, 0, 0))
        for block in self.query(LabeledRows):
            block.rows = [(label, "–") for label, _ in block.rows]

    def show(self, s: Snapshot) -> None:
        for name, (title, rows) in panel_rows.blocks(s, self._link).items():
            block = self.query_one(f"#{name}-rows", LabeledRows)
            block.border_title, block.rows = Content(f" {title} "), rows  # a str would be markup
            block.set_class(not rows, "empty")
        self.query_one(Badges).badges = s.badges
        auto = self.query_one("#auto", Static)
        auto.display = bool(s.auto)
        auto.update(s.auto)
        self.query_one("#plain-rows", LabeledRows).rows = panel_rows.plain_rows(s)
        # "calm" is the normal case, and in freeze on a GPU the column has no line to spare for it.
        self.query_one("#own-rows", LabeledRows).rows = [
            row for row in panel_rows.extra_rows(s.extras) if row != ("recovery", CALM)
        ]
        timeline = self.query_one(Timeline)
        timeline.set_class(not s.total, "empty")
        if s.total:
            timeline.add(s.active, s.total)
        else:
            timeline.clear()
        for block in self.query(LabeledRows):
            block.mode = s.mode
        self._explain()

    def on_focus(self) -> None:
        self.action_choose(0)

    def on_blur(self) -> None:
        self._choose(None)

    def action_choose(self, step: int) -> None:
        blocks = (block for block in self.screen.query(LabeledRows) if block.size)
        rows = [(block, row) for block in blocks for row in range(len(block.rows))]
        if rows:
            at = next((at for at, (block, row) in enumerate(rows) if block.chosen == row), 0)
            self._choose(*rows[max(0, min(at + step, len(rows) - 1))])

    def _choose(self, chosen: LabeledRows | None, row: int | None = None) -> None:
        if self._chosen is not None:
            self._chosen.chosen = None
        self._chosen = chosen
        if chosen is not None:
            chosen.chosen = row
            chosen.scroll_visible(animate=False)
        self._explain()

    def _explain(self) -> None:
        """Explain the chosen row; a new snapshot may have put another one there."""
        text = visible(self._chosen.explanation(self._chosen.chosen)) if self._chosen else ""
        meaning = self.query_one("#meaning", Static)
        if text != meaning.content:  # an update costs a layout
            meaning.update(text)


class DetailColumn(FigureColumn, can_focus=False):
    """The second column of large screens: the mode's own figures, details, the ribbon's legend and the event log."""

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
        yield LabeledRows("this mode", id="extra-rows")
        yield HeadMap(self._state, max_rows=COLUMN_ROWS)
        yield RecallHistogram(self._state)
        yield GpuHistoryPlot(self._state)
        yield Static(legend(self._on_gpu), id="legend", classes="block")
        yield EventLog(id="events")

    def on_mount(self) -> None:
        self.query_one("#legend").border_title = " ribbon "
        self.query_one("#extra-rows", LabeledRows).display = False

    def show(self) -> None:
        s = self._state.snapshot
        own = self.query_one("#extra-rows", LabeledRows)
        own.mode, own.rows = (s.mode, panel_rows.extra_rows(s.extras)) if s else ("", [])
        own.display = bool(own.rows)
        for chart in self.query(Chart):
            chart.redraw()
        if (on_gpu := s is None or panel_rows.has_gpu(s)) != self._on_gpu:  # an update costs a layout
            self._on_gpu = on_gpu
            self.query_one("#legend", Static).update(legend(on_gpu))


def legend(on_gpu: bool) -> Content:
    """Return the ribbon's legend, a line each: glyphs of read shares, states, and marks of switches and messages."""
    lines = [Content.assemble((f"{BARS[0]}{BARS[3]}{BARS[7]}", "$ribbon-device"), "  read by few, half, all heads")]
    for letter, word in panel_rows.state_words(on_gpu).items():
        lines.append(Content.assemble((f" {GLYPHS.get(letter, BARS[7])} ", f"$ribbon-{CLASSES[letter]}"), f"  {word}"))
    lines.append(Content.assemble((" ┃ ", "$ribbon-tick"), "  the mode changed"))
    return Content("\n").join(
        [*lines, Content.assemble(("░▒█", "$ribbon-device"), "  next to a message: how much of it is read")]
    )


@dataclass(frozen=True)
class Point:
    """A step that ``read`` some of the ``stored`` tokens; ``switched`` if the mode changed since the point before."""

    read: float
    stored: float
    switched: bool = False


def by_tokens(points: Sequence[Point], width: int, ticks: Sequence[int] = ()) -> list[Point]:
    """Return a point for each of ``width`` equal ranges of stored tokens, up to the number that the last point has.

    A range shows what its last step read, or else the last step before it; 0 before the first step. ``ticks`` are the
    numbers of stored tokens at which the mode changed.
    """
    total = points[-1].stored if points else 0.0
    columns, index, read = [], 0, 0.0
    for column in range(width if total else 0):
        begin, stored = total * column / width, total * (column + 1) / width
        while index < len(points) and points[index].stored <= stored:
            read = points[index].read
            index += 1
        columns.append(Point(min(read, stored), stored, any(begin < tick <= stored for tick in ticks)))
    return columns


def column_glyphs(point: Point, top: float, height: int) -> list[str]:
    """Return the glyphs of one column from the top row down; the top row holds only marks of switches."""
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
    """Return labels for the upper left of the plot, where it is low: the axis, and the counts of the last step.

    The axis label shares the row of the marks and is left out if a mark is there.
    """
    marks = "".join(column[0] for column in columns[: len(AXIS_LABEL)])
    counts = [f"{STORED} {count(point.stored)} stored", f"{BARS[-1]} {count(point.read)} read"]
    return ["" if MARK in marks else AXIS_LABEL, *(counts if len(columns[0]) >= LABELED_HEIGHT else [])]


class Timeline(Block):
    """A plot of the tokens read and stored by each step, from the first stored token at the left to the newest."""

    DEFAULT_CSS = "Timeline { height: 6; border-top: none; padding: 0; }"

    ticks: reactive[tuple[int, ...]] = reactive(())

    def __init__(self) -> None:
        super().__init__()
        self.border_title = f" {panel_rows.READ_OF_STORED} "  # drawn only if the CSS gives it a border
        self.points: list[Point] = []

    def add(self, read: float, stored: float) -> None:
        """Add a step; steps with as many tokens or more are dropped, because the conversation was truncated."""
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
        columns = [column_glyphs(point, points[-1].stored, height) for point in points]
        texts = labels(self.points[-1], columns)
        return [_line(glyphs, text) for glyphs, text in zip_longest(zip(*columns, strict=True), texts, fillvalue="")]


def _line(glyphs: Sequence[str], label: str) -> Content:
    """Return a row of the plot with the letters of ``label`` in its empty cells."""
    cells = [
        (glyph, PLOT_STYLES.get(glyph, "$ribbon-device"))
        if glyph != " "
        else (letter, LABEL_STYLES.get(letter, "$foreground"))
        for glyph, letter in zip(glyphs, label.ljust(len(glyphs)), strict=False)
    ]
    runs = groupby(cells, key=itemgetter(1))
    return Content.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))


class EventLog(Static, can_focus=False):
    """The latest events, the newest first; ``show`` replaces them, to repeat another log's."""

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
        """Add an event at the top, with the current time."""
        line = text if len(text) <= EVENT_LENGTH else text[:EVENT_LENGTH] + "…"
        self.show((f"{time.strftime('%H:%M:%S')}  {line}", *self.lines[: MAX_EVENTS - 1]))

    def show(self, lines: Sequence[str]) -> None:
        if self.lines != tuple(lines):  # an update costs a layout
            self.lines = tuple(lines)
            self.update("\n".join(lines))
