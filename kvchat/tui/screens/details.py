"""The details screen: tokens read and held by layer and KV head, fetch times, GPU history, last events."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import DescendantFocus
from textual.widgets import Static

from kvchat.tui.actions import bindings
from kvchat.tui.controller import ChatController
from kvchat.tui.screens.base import Dialog
from kvchat.tui.widgets.bars import KeyHints
from kvchat.tui.widgets.charts import Chart, GpuHistoryPlot, HeadMap, RecallHistogram
from kvchat.tui.widgets.panels import EventLog

WATCHER = "screen"
LAST_EVENTS = 12  # as many as fit on a screen of 24 lines


class DetailsScreen(Dialog):
    """The parts of the detail column, made focusable; the last lines explain the focused one.

    ``events`` is the log whose latest lines are repeated; None if the chat screen shows it.
    """

    CSS = """
    DetailsScreen > Vertical { width: 100; height: 100%; max-height: 44; }
    DetailsScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    DetailsScreen #explanation { height: 2; color: $foreground; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("details")
    AUTO_FOCUS = "HeadMap"

    def __init__(self, controller: ChatController, events: EventLog | None) -> None:
        super().__init__()
        self._controller = controller
        self._events = events

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "details"
            with VerticalScroll(can_focus=False):
                state = self._controller.state
                parts: list[Chart | EventLog] = [HeadMap(state), HeadMap(state, holds=True)]
                parts += [RecallHistogram(state), GpuHistoryPlot(state)]
                if self._events is not None:
                    parts.append(EventLog())
                for part in parts:
                    part.can_focus = True
                    yield part
            yield Static(id="explanation", markup=False)
            yield KeyHints()

    def on_mount(self) -> None:
        self._controller.details.begin(WATCHER)
        self.show()

    def on_unmount(self) -> None:
        self._controller.details.end(WATCHER)

    def show(self) -> None:
        for chart in self.query(Chart):
            chart.redraw()
        if self._events is not None:
            for log in self.query(EventLog):
                log.show(self._events.lines[:LAST_EVENTS])
        self.explain()

    @on(DescendantFocus)
    @on(HeadMap.CursorMoved)
    def explain(self) -> None:
        if isinstance(self.focused, Chart | EventLog):
            self.query_one("#explanation", Static).update(self.focused.explanation)
