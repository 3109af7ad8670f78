"""What the screens share that search in a list: a field above, what was found below."""

from __future__ import annotations

from typing import Generic, TypeVar

from textual.screen import ModalScreen
from textual.widgets import OptionList

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


class SearchScreen(ModalScreen[None], Generic[Found]):
    """``shown`` are the things in the list, by the ids of their options."""

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
