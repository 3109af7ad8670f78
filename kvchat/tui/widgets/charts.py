"""Charts: a map of layers and KV heads, a histogram of fetch times per step, NVML's readings of the last minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from kvchat.protocol.messages import RECALL_EDGES_MS, Details, RecallBin
from kvchat.tui import panel_rows
from kvchat.tui.actions import bindings
from kvchat.tui.state import ChatState, Moment
from kvchat.units import BARS, MISSING, bars, count, figure, percent, size

Counts = Sequence[Sequence[int]]
NONE = "·"
HEAD_LABEL_WIDTH = 3
MAX_COLUMN = 4
NOTHING_STORED = "nothing stored yet"
HIDDEN, EXPOSED = "░", "█"
TIME_LABEL_WIDTH, COUNT_WIDTH = 10, 4
NOTHING_FETCHED = "nothing was fetched for the last tokens"
READING_LABEL_WIDTH, VALUE_WIDTH = 7, 20
NO_GPU = "no GPU, so there is no history"
NO_READING = "NVML gives no reading of this GPU"


def labeled(label: str, value: str, width: int) -> Content:
    """Return a line with ``label`` at the left and ``value`` at the right, cut if it is too long."""
    room = max(width - len(label) - 1, 3)
    shown = value if len(value) <= room else value[: room - 1] + "…"
    gap = " " * max(width - len(label) - len(shown), 1)
    return Content.assemble(label, gap, (shown, "dim" if value == MISSING else "$foreground"))


class Block(Widget, can_focus=False):
    """Lines under a title."""

    DEFAULT_CSS = """
    Block { height: auto; border-top: solid $foreground 15%; border-title-color: $primary; padding: 0 1;
            color: $text-muted; }
    Block:focus { border-top: solid $primary; }
    """
    _drawn: Sequence[Content] = ()

    def lines(self, width: int) -> list[Content]:
        """Return the rows to draw in ``width`` cells; their number does not depend on ``width``."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the lines if they have changed; ask for a layout only if their number has."""
        before, self._drawn = self._drawn, self.lines(self._room)
        if self._drawn != before:
            self.refresh(layout=len(self._drawn) != len(before))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._drawn)

    def render(self) -> Content:
        return Content("\n").join(self.lines(self._room))

    @property
    def _room(self) -> int:
        return self.content_size.width or 34


class Chart(Block):
    """A block that draws figures of the state; ``heading`` is its title, by which its explanation is found."""

    heading: str

    def __init__(self, state: ChatState) -> None:
        super().__init__()
        self._state = state

    def on_mount(self) -> None:
        self.border_title = f" {self.heading} "
        self.redraw()

    @property
    def explanation(self) -> str:
        return panel_rows.EXPLANATIONS[self.heading]


class HeadMap(Chart):
    """A map of the tokens that each layer and KV head reads, or ``holds``, in at most ``max_rows`` rows of heads.

    If it can be focused, a cursor moves over layers and heads, and ``explanation`` has the figures under it.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings("map")

    cursor: reactive[tuple[int, int]] = reactive((0, 0))

    class CursorMoved(Message):
        """The cursor has moved to another layer or head."""

    def __init__(self, state: ChatState, holds: bool = False, max_rows: int = 8) -> None:
        super().__init__(state)
        self.heading = panel_rows.HELD_BY_HEAD if holds else panel_rows.READ_BY_HEAD
        self._holds = holds
        self._max_rows = max_rows

    @property
    def details(self) -> Details:
        return self._state.details or Details(0)

    @property
    def counts(self) -> Counts:
        """Number of tokens, ``[layer][head]``."""
        return self.details.held if self._holds else self.details.read

    @property
    def explanation(self) -> str:
        """The figures under the cursor; without any, what the map shows."""
        layer, head = self.cursor
        d = self.details
        if layer >= len(d.read) or head >= len(d.read[layer]):
            return super().explanation
        held = d.held[layer][head] if layer < len(d.held) and head < len(d.held[layer]) else 0
        read = d.read[layer][head]
        share = percent(read / d.total) if d.total else ""
        return (
            f"Layer {layer}, KV head {head} read {count(read)} of {count(d.total)} ({share}); {count(held)} in slots."
        )

    def action_move(self, layers: int, heads: int) -> None:
        most_layers, most_heads = _shape(self.details)
        layer, head = self.cursor
        self.cursor = (max(min(layer + layers, most_layers - 1), 0), max(min(head + heads, most_heads - 1), 0))
        self.post_message(self.CursorMoved())

    def lines(self, width: int) -> list[Content]:
        """Return a line for each row of heads, and below them the smallest and largest count of a head."""
        d, every = self.details, [tokens for layer in self.counts for tokens in layer]
        if not d.total or not every:
            return [Content(NOTHING_STORED)]
        grid = layout(*_shape(d), max(width - HEAD_LABEL_WIDTH, 1), self._max_rows)
        lines = [self._row(grid, row) for row in range(len(grid.heads) - 1)]
        least, most = min(every), max(every)
        span = count(least) if least == most else f"{count(least)} to {count(most)}"
        return [*lines, Content.assemble(f"{span} of {count(d.total, 'token')} a head", (grid.note, "dim"))]

    def _row(self, grid: Grid, row: int) -> Content:
        first, last = grid.heads[row], grid.heads[row + 1]
        cells: list[tuple[str, str]] = []
        for start, end in pairwise(grid.layers):
            group = [tokens for layer in self.counts[start:end] for tokens in layer[first:last]]
            share = sum(group) / (len(group) * self.details.total) if group else 0.0
            style = "$ribbon-device" if share else "$ribbon-host"
            if self.has_focus and start <= self.cursor[0] < end and first <= self.cursor[1] < last:
                style += " reverse"
            cells.append((glyph(share) * grid.column, style))
        return Content.assemble(f"{first:<{HEAD_LABEL_WIDTH}}", *cells)


@dataclass(frozen=True)
class Grid:
    """Column ``i`` shows the layers ``layers[i]`` to ``layers[i + 1]``, row ``i`` the heads likewise.

    A column is ``column`` cells wide; ``note`` says how many layers and heads share a cell, if several do.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    column: int
    note: str


def layout(layers: int, heads: int, width: int, height: int) -> Grid:
    """Lay out layers and heads in ``width`` columns and ``height`` rows; if they do not fit, several share a cell."""
    columns, rows = min(layers, width), min(heads, height)
    layer_edges = tuple(column * layers // columns for column in range(columns + 1)) if columns else (0,)
    head_edges = tuple(row * heads // rows for row in range(rows + 1)) if rows else (0,)
    shared = (-(-layers // columns) if columns else 1, -(-heads // rows) if rows else 1)
    note = f"  a cell: {shared[0]} × {shared[1]}" if shared != (1, 1) else ""
    return Grid(layer_edges, head_edges, max(1, min(width // max(columns, 1), MAX_COLUMN)), note)


def glyph(share: float) -> str:
    """Return the block for a share of the stored tokens: a full one for all of them, a step lower per halving.

    The scale is logarithmic because most heads read few of many tokens and would look alike on a linear one.
    """
    return BARS[max(len(BARS) - 1 + round(math.log2(share)), 0)] if share else NONE


def _shape(details: Details) -> tuple[int, int]:
    return len(details.read), max(map(len, details.read), default=0)


class RecallHistogram(Chart):
    """A line for each range of fetch times, from the shortest to the longest that occurred, and percentiles."""

    heading = panel_rows.FETCH_TIMES

    def lines(self, width: int) -> list[Content]:
        """Return the bins, and below them a legend and the percentiles."""
        bins = self._state.details.recall if self._state.details else ()
        if not bins:
            return [Content(NOTHING_FETCHED)]
        most = max(found.steps for found in bins)
        lines = [
            Content.assemble(
                f"{bin_label(index):>{TIME_LABEL_WIDTH}} ",
                *recall_bar(bins[index], most, max(width - TIME_LABEL_WIDTH - COUNT_WIDTH - 2, 4)),
                f" {count(bins[index].steps):>{COUNT_WIDTH}}",
            )
            for index in occupied_bins(bins)
        ]
        lines.append(
            Content.assemble(" " * TIME_LABEL_WIDTH, (f" {HIDDEN}", "$ribbon-host"), " hidden  ",
                             (EXPOSED, "$ribbon-device"), " waited for")
        )  # fmt: skip
        times = panel_rows.recall_times(self._state.snapshot) if self._state.snapshot else []
        return lines + [labeled(name, value, width) for name, value in times]


def occupied_bins(bins: Sequence[RecallBin]) -> range:
    """Return the indices from the first to the last bin that has a step."""
    indices = [index for index, found in enumerate(bins) if found.steps]
    return range(indices[0], indices[-1] + 1) if indices else range(0)


def bin_label(index: int) -> str:
    """Return the range of times of a bin, such as ``0.2–0.5 ms``."""
    edges = RECALL_EDGES_MS
    if index == 0:
        return f"< {_edge(edges[0], 'ms')}"
    if index >= len(edges):
        return f"≥ {_edge(edges[-1], 'ms')}"
    return f"{_edge(edges[index - 1])}–{_edge(edges[index], 'ms')}"


def _edge(value: float, unit: str = "") -> str:
    return figure(value, unit, digits=int(value < 1))


def recall_bar(shown: RecallBin, most: int, width: int) -> tuple[tuple[str, str], ...]:
    """Return a bar of ``width`` cells for ``most`` steps, divided in proportion to the hidden and the exposed time."""
    length = max(round(shown.steps / most * width), 1) if shown.steps else 0
    took = shown.hidden_ms + shown.exposed_ms
    hidden = round(length * shown.hidden_ms / took) if took else 0
    return (
        (HIDDEN * hidden, "$ribbon-host"),
        (EXPOSED * (length - hidden), "$ribbon-device"),
        (" " * (width - length), ""),
    )


class GpuHistoryPlot(Chart):
    """Memory, load, power and PCIe traffic; one line with the reason if there are no readings."""

    heading = panel_rows.GPU_HISTORY

    def lines(self, width: int) -> list[Content]:
        """Return a line for each reading: its name, its history and its current value."""
        room = max(width - READING_LABEL_WIDTH - VALUE_WIDTH - 1, 4)
        return [
            Content.assemble(
                f"{name:<{READING_LABEL_WIDTH}}",
                (bars(values[-room:], top).rjust(room), "$primary"),
                (f" {value:>{VALUE_WIDTH}}", "dim" if value == MISSING else "$foreground"),
            )
            for name, values, top, value in readings(self._state.gpu_history.moments)
        ] or [Content(NO_READING if self._state.snapshot and panel_rows.has_gpu(self._state.snapshot) else NO_GPU)]


def readings(moments: Sequence[Moment]) -> tuple[tuple[str, tuple[float | None, ...], float, str], ...]:
    """Return name, history, the value of a full bar and the current value per reading; nothing without a moment."""
    if not moments:
        return ()
    now = moments[-1]
    power, pcie = tuple(moment.power for moment in moments), tuple(moment.pcie for moment in moments)
    used = MISSING if now.used is None else f"{size(now.used)} / {size(now.total)}"
    return (
        ("memory", tuple(moment.used for moment in moments), float(now.total or 0), used),
        ("load", tuple(moment.utilization for moment in moments), 100.0, figure(now.utilization, "%")),
        ("power", power, _top(power), figure(now.power, "W")),
        ("PCIe", pcie, _top(pcie), MISSING if now.pcie is None else f"{size(now.pcie)}/s"),
    )


def _top(values: Sequence[float | None]) -> float:
    return max(filter(None, values), default=0.0)
