"""What the screens share that search in a list: a field above, what was found below."""

from __future__ import annotations

from typing import Generic, TypeVar

from textual.screen import ModalScreen
from textual.widgets import OptionList

Found = TypeVar("Found")


class SearchScreen(ModalScreen[None], Generic[Found]):
    """``shown`` are the things in the list, by the ids of their options."""

    CSS = """
    SearchScreen { align: center middle; }
    SearchScreen > Vertical {
        width: 100; max-width: 100%; height: 90%; padding: 0 1; background: $surface; border: round $primary;
    }
    SearchScreen Input { border: none; height: 1; margin: 0 0 1 0; background: $surface; }
    SearchScreen OptionList { height: 1fr; border: none; padding: 0; background: $surface; }
    SearchScreen Static { color: $text-muted; height: 1; }
    """
    AUTO_FOCUS = "Input"

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Found] = {}

    def action_list(self) -> None:
        """Go from the search field to the list."""
        self.query_one(OptionList).focus()

    @property
    def highlighted(self) -> Found | None:
        """What Enter in the search field would take."""
        option = self.query_one(OptionList).highlighted_option
        return self.shown.get(option.id or "") if option else None
