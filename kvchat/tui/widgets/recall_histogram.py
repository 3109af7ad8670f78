"""Histogram of the time that recall took a step, hidden behind the model's work and exposed."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import RECALL_EDGES_MS, RecallBin
from kvchat.tui.panel_rows import EXPLANATIONS, FETCH_TIMES, recall_times
from kvchat.units import count, figure

HIDDEN, EXPOSED = "░", "█"
LABEL_WIDTH, COUNT_WIDTH = 10, 4
NOTHING = "nothing was fetched for the last tokens"


class RecallHistogram(Widget, can_focus=False):
    """A line for each range of times, from the shortest to the longest that occurred; the percentiles below."""

    DEFAULT_CSS = """
    RecallHistogram { height: auto; border-top: solid $foreground 15%; border-title-color: $primary; padding: 0 1;
                      color: $text-muted; }
    RecallHistogram:focus { border-top: solid $primary; }
    """

    bins: reactive[tuple[RecallBin, ...]] = reactive(())
    times: reactive[tuple[tuple[str, str], ...]] = reactive(())

    def on_mount(self) -> None:
        self.border_title = f" {FETCH_TIMES} "

    @property
    def explanation(self) -> str:
        """The meaning of the figures shown."""
        return EXPLANATIONS[FETCH_TIMES]

    def show(self, bins: Sequence[RecallBin], snapshot: Snapshot | None) -> None:
        """Draw the bins, and the snapshot's percentiles."""
        before = self.get_content_height(self.size, self.size, 0)
        self.bins = tuple(bins)
        self.times = tuple(recall_times(snapshot)) if snapshot else ()
        if self.get_content_height(self.size, self.size, 0) != before:
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return (len(occupied(self.bins)) + 1 + len(self.times)) if self.bins else 1

    def render(self) -> Content:
        """The lines, and below them which sign is which."""
        if not self.bins:
            return Content.assemble((NOTHING, "dim"))
        width = self.content_size.width or 34
        most = max(one.steps for one in self.bins)
        lines = [
            Content.assemble(
                f"{label(place):>{LABEL_WIDTH}} ",
                *bar(self.bins[place], most, max(width - LABEL_WIDTH - COUNT_WIDTH - 2, 4)),
                f" {count(self.bins[place].steps):>{COUNT_WIDTH}}",
            )
            for place in occupied(self.bins)
        ]
        lines.append(
            Content.assemble(" " * LABEL_WIDTH, (f" {HIDDEN}", "$ribbon-host"), " hidden  ",
                             (EXPOSED, "$ribbon-device"), " waited for")
        )  # fmt: skip
        lines += [
            Content.assemble(name, " " * max(width - len(name) - len(value), 1), (value, "$foreground"))
            for name, value in self.times
        ]
        return Content("\n").join(lines)


def occupied(bins: Sequence[RecallBin]) -> range:
    """The places of the bins from the first to the last that has a step."""
    places = [place for place, one in enumerate(bins) if one.steps]
    return range(places[0], places[-1] + 1) if places else range(0)


def label(place: int) -> str:
    """The times of a bin: ``0.2–0.5 ms``."""
    edges = RECALL_EDGES_MS
    if place == 0:
        return f"< {_edge(edges[0], 'ms')}"
    if place >= len(edges):
        return f"≥ {_edge(edges[-1], 'ms')}"
    return f"{_edge(edges[place - 1])}–{_edge(edges[place], 'ms')}"


def _edge(value: float, unit: str = "") -> str:
    return figure(value, unit, digits=int(value < 1))


def bar(one: RecallBin, most: int, width: int) -> tuple[tuple[str, str], ...]:
    """As long as there are steps, ``width`` for ``most``; divided by what of their time was hidden."""
    length = max(round(one.steps / most * width), 1) if one.steps else 0
    took = one.hidden_ms + one.exposed_ms
    hidden = round(length * one.hidden_ms / took) if took else 0
    return (
        (HIDDEN * hidden, "$ribbon-host"),
        (EXPOSED * (length - hidden), "$ribbon-device"),
        (" " * (width - length), ""),
    )
