"""The list above the prompt: what may follow what is being typed."""

from __future__ import annotations

from textual.content import Content
from textual.widgets.option_list import Option

from kvchat.foreign_text import visible
from kvchat.tui.prompt.suggestions import Offer, Suggestion
from kvchat.tui.widgets.options import Options

MAX_LABEL = 34


class SuggestionList(Options):
    """Shows an ``Offer``; hidden without one. The prompt keeps the focus and moves the highlight."""

    can_focus = False
    DEFAULT_CSS = """
    SuggestionList { display: none; height: auto; max-height: 10; margin: 0 1; padding: 0; border: none;
                     text-wrap: nowrap; text-overflow: ellipsis;
                     background: $surface; color: $text-muted; scrollbar-size-vertical: 1; }
    SuggestionList > .option-list--option-highlighted { background: $boost; color: $foreground; text-style: bold; }
    SuggestionList > .option-list--option-disabled { color: $text-disabled; text-style: italic; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self.offer: Offer | None = None
        self._is_chosen = False

    @property
    def is_open(self) -> bool:
        """True if there is a suggestion to take."""
        return bool(self.display) and self.offer is not None and bool(self.offer.suggestions)

    @property
    def suggestion(self) -> Suggestion | None:
        """The highlighted suggestion, else the first."""
        if self.offer is None or not self.offer.suggestions:
            return None
        return self.offer.suggestions[max((self.highlighted or 0) - bool(self.offer.usage), 0)]

    @property
    def takes_enter(self) -> bool:
        """True if Enter takes the suggestion instead of sending."""
        return self.is_open and self.offer is not None and (self.offer.takes_by_enter or self._is_chosen)

    def close(self) -> None:
        """Hide the list until more is typed."""
        self.display = False

    def show(self, offer: Offer | None) -> None:
        """Show an offer, or nothing; one that is shown stays as it is."""
        if offer == self.offer:
            return
        self.offer, self._is_chosen = offer, False
        self.display = offer is not None and bool(offer.suggestions or offer.usage)
        self.clear_options()
        if offer is None:
            return
        if offer.usage:
            self.add_option(Option(Content(visible(offer.usage)), disabled=True))
        width = min(max((len(visible(one.label)) for one in offer.suggestions), default=0), MAX_LABEL)
        self.add_options([Option(_line(one, width)) for one in offer.suggestions])
        is_selected = offer.takes_by_enter or not offer.usage  # alone, an argument that is left out means something
        self.highlighted = int(bool(offer.usage)) if is_selected and offer.suggestions else None

    def move(self, step: int) -> None:
        """Highlight the suggestion ``step`` further on."""
        self._is_chosen = True
        if step > 0:
            self.action_cursor_down()
        else:
            self.action_cursor_up()


def _line(suggestion: Suggestion, width: int) -> Content:
    mark = "●" if suggestion.is_present else " "
    label = visible(suggestion.label)
    return Content.assemble(f"{mark} ", (f"{label:<{width}}", "$foreground"), f"  {visible(suggestion.doc)}")
