"""The first column of large screens: the conversations kept, the one written to last first."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from kvchat.conversations.store import Summary
from kvchat.foreign_text import visible
from kvchat.tui.widgets.options import Options


class ConversationColumn(Options, can_focus=False):
    """A title a line, the present one's marked; a click opens another. Keys search in ``ConversationsScreen``."""

    DEFAULT_CSS = """
    ConversationColumn {
        width: 30; height: 100%; padding: 0 1; border: none; border-top: solid $foreground 15%; background: $surface;
        border-title-color: $primary; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis;
        scrollbar-size-vertical: 1;
    }
    """

    class Chosen(Message):
        """The conversation ``id`` was clicked."""

        def __init__(self, id: str) -> None:
            super().__init__()
            self.id = id

    def __init__(self) -> None:
        super().__init__()
        self.border_title = " conversations "
        self._titles: dict[str, str] = {}
        self._present = ""

    def show(self, kept: Sequence[Summary], present: str) -> None:
        """List what is kept; ``present`` is the id of the conversation on the screen, which may not be kept yet."""
        titles = {summary.id: visible(summary.title or "(no title)") for summary in kept}
        self._present = present
        if list(titles.items()) != list(self._titles.items()):
            self._titles = titles
            self.set_options(Option(Content(title), id) for id, title in titles.items())
        self._mark()

    @on(OptionList.OptionSelected)
    def choose(self, event: OptionList.OptionSelected) -> None:
        """Ask for the conversation clicked; the mark stays with the present one until it is there."""
        event.stop()
        self._mark()
        if event.option.id and event.option.id != self._present:
            self.post_message(self.Chosen(event.option.id))

    def _mark(self) -> None:
        self.highlighted = list(self._titles).index(self._present) if self._present in self._titles else None
