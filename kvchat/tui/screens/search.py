"""Base of the screens that search in a list: a field above, the results below."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from textual.binding import BindingType
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList

from kvchat.tui.actions import bindings
from kvchat.tui.screens.closing import ClosesOnce
from kvchat.tui.widgets.options import Options

Found = TypeVar("Found")


def css_of(screen: str, width: int) -> str:
    """The styles of the screen of that name: Textual applies a screen's ``CSS`` by the name of its own class only."""
    return f"""
    {screen} {{ align: center middle; }}
    {screen} > Vertical {{
        width: {width}; max-width: 100%; height: 90%; padding: 0 1; background: $surface; border: round $primary;
    }}
    {screen} Input {{ border: none; height: 1; margin: 0 0 1 0; background: $surface; }}
    {screen} OptionList {{ height: 1fr; border: none; padding: 0; background: $surface; }}
    {screen} Static {{ color: $text-muted; height: 1; }}
    """


class SearchField(Input):
    """It alone takes the focus and no key has priority, so that all keys wait in one queue and act in their order.

    The keys of the screen are its own, in place of those of a line that are the same.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings("search")


class FoundList(Options, can_focus=False):
    """The results; the keys that move in them come through the field."""


class SearchScreen(ClosesOnce, ModalScreen[None], Generic[Found]):
    """``shown`` are the things in the list, by the ids of their options."""

    AUTO_FOCUS = "SearchField"

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Found] = {}

    def action_move(self, move: str) -> None:
        """Move in the list."""
        getattr(self.query_one(OptionList), f"action_{move}")()

    @property
    def highlighted(self) -> Found | None:
        """The result that Enter would take."""
        option = self.query_one(OptionList).highlighted_option
        return self.shown.get(option.id or "") if option else None
