"""The last events as lines, each with its time, the newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual.widgets import Static

from kvchat.tui.panel_rows import EVENTS, EXPLANATIONS

MAX_EVENTS = 200
EVENT_LENGTH = 400  # characters; a library's error may be of any length


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
        self.border_title = f" {EVENTS} "

    @property
    def explanation(self) -> str:
        """The meaning of the figures shown."""
        return EXPLANATIONS[EVENTS]

    def add(self, text: str) -> None:
        """Put an event of now before the others."""
        line = text if len(text) <= EVENT_LENGTH else text[:EVENT_LENGTH] + "…"
        self.show((f"{time.strftime('%H:%M:%S')}  {line}", *self.lines[: MAX_EVENTS - 1]))

    def show(self, lines: Sequence[str]) -> None:
        """Draw these lines."""
        if self.lines != tuple(lines):  # an update is a new layout
            self.lines = tuple(lines)
            self.update("\n".join(lines))
