"""Layers and KV heads as a map: a column for each layer, a row for each head, as high as it reads much."""

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

from kvchat.protocol.messages import Details
from kvchat.tui.actions import bindings
from kvchat.tui.panel_rows import EXPLANATIONS, HELD_BY_HEAD, READ_BY_HEAD
from kvchat.units import BARS, count, percent

Counts = Sequence[Sequence[int]]
NONE = "·"
LABEL_WIDTH = 3
MAX_COLUMN = 4
NOTHING = "nothing stored yet"


class HeadMap(Widget, can_focus=False):
    """The tokens that each layer and KV head reads, or those it ``holds``; at most ``max_rows`` rows of heads.

    Where it can be focused a cursor walks over layers and heads, and ``explanation`` tells the figures under it.
    """

    DEFAULT_CSS = """
    HeadMap { height: auto; border-top: solid $foreground 15%; border-title-color: $primary; padding: 0 1;
              color: $text-muted; }
    HeadMap:focus { border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("map")

    details: reactive[Details] = reactive(Details(0))
    cursor: reactive[tuple[int, int]] = reactive((0, 0))

    class Moved(Message):
        """The cursor is on another layer or head."""

    def __init__(self, holds: bool = False, max_rows: int = 8, id: str | None = None) -> None:
        super().__init__(id=id)
        self._title = HELD_BY_HEAD if holds else READ_BY_HEAD
        self._holds = holds
        self._max_rows = max_rows

    def on_mount(self) -> None:
        self.border_title = f" {self._title} "

    @property
    def counts(self) -> Counts:
        """Tokens by layer and head."""
        return self.details.held if self._holds else self.details.read

    @property
    def explanation(self) -> str:
        """The meaning of the figures shown, and those under the cursor."""
        layer, head = self.cursor
        if not self._has(layer, head):
            return EXPLANATIONS[self._title]
        d = self.details
        held = d.held[layer][head] if layer < len(d.held) and head < len(d.held[layer]) else 0
        read = d.read[layer][head]
        share = percent(read / d.total) if d.total else ""
        return (
            f"Layer {layer}, KV head {head} read {count(read)} of {count(d.total)} ({share}); {count(held)} in slots."
        )

    def watch_details(self, old: Details, new: Details) -> None:
        """A new layout only where the shape changed."""
        self.refresh(layout=_shape(old) != _shape(new))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return (min(_shape(self.details)[1], self._max_rows) + 1) if self.counts else 1

    def action_move(self, layers: int, heads: int) -> None:
        """Move the cursor to another layer or head."""
        most_layers, most_heads = _shape(self.details)
        layer, head = self.cursor
        self.cursor = (_within(layer + layers, most_layers), _within(head + heads, most_heads))
        self.post_message(self.Moved())

    def render(self) -> Content:
        """A line for each row of heads, and below them the least and the most of a head."""
        d, counts = self.details, self.counts
        layers, heads = _shape(d)
        if not d.total or not counts:
            return Content.assemble((NOTHING, "dim"))
        grid = arranged(layers, heads, max((self.content_size.width or 34) - LABEL_WIDTH, 1), self._max_rows)
        lines = [self._row(grid, row) for row in range(len(grid.heads) - 1)]
        every = [tokens for layer in counts for tokens in layer]
        least, most = min(every), max(every)
        span = count(least) if least == most else f"{count(least)} to {count(most)}"
        return Content("\n").join(
            [*lines, Content.assemble(f"{span} of {count(d.total)} tokens a head", (grid.note, "dim"))]
        )

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
        return Content.assemble(f"{first:<{LABEL_WIDTH}}", *cells)

    def _has(self, layer: int, head: int) -> bool:
        return layer < len(self.details.read) and head < len(self.details.read[layer])


@dataclass(frozen=True)
class Grid:
    """The layers of each column and the heads of each row: ``layers[i]`` to ``layers[i + 1]``.

    A column is ``column`` cells wide; ``note`` says what a cell is, where it is more than one head.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    column: int
    note: str


def arranged(layers: int, heads: int, width: int, height: int) -> Grid:
    """Put so many layers and heads into ``width`` columns and ``height`` rows; those that do not fit share a cell."""
    columns, rows = min(layers, width), min(heads, height)
    edges = tuple(place * layers // columns for place in range(columns + 1)) if columns else (0,)
    lines = tuple(place * heads // rows for place in range(rows + 1)) if rows else (0,)
    together = (-(-layers // columns) if columns else 1, -(-heads // rows) if rows else 1)
    note = f"  a cell: {together[0]} × {together[1]}" if together != (1, 1) else ""
    return Grid(edges, lines, max(1, min(width // max(columns, 1), MAX_COLUMN)), note)


def glyph(share: float) -> str:
    """The block of a share of what is stored: a full one for all, each step lower for half of it.

    Most heads read few of many tokens: by the share itself all of them would be alike.
    """
    return BARS[max(len(BARS) - 1 + round(math.log2(share)), 0)] if share else NONE


def _shape(details: Details) -> tuple[int, int]:
    return len(details.read), max(map(len, details.read), default=0)


def _within(place: int, many: int) -> int:
    return max(0, min(place, many - 1))
