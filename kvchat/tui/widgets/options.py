"""Lists of lines to choose from that survive what Textual's do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.command import CommandList
from textual.events import Click
from textual.widgets import OptionList

if TYPE_CHECKING:
    _List = OptionList
else:
    _List = object


class _Steady(_List):
    def on_click(self, event: Click) -> None:
        """Ignore a click on a line that was there when it was drawn: Textual fails at its number."""
        line = event.style.meta.get("option")
        if line is not None and line >= self.option_count:
            event.prevent_default()

    def action_page_down(self) -> None:
        """A page down, where there is a line: Textual fails at pages of none."""
        if self.size:
            super().action_page_down()  # type: ignore[no-untyped-call]

    def action_page_up(self) -> None:
        """A page up, where there is a line."""
        if self.size:
            super().action_page_up()  # type: ignore[no-untyped-call]


class Options(_Steady, OptionList):
    """An option list."""


class PaletteOptions(_Steady, CommandList):
    """The command palette's list."""
