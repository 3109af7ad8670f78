"""Where a question is written: the prompt, and above it the list of what may follow."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import OptionList, TextArea

from kvchat.tui import command_offers
from kvchat.tui.arguments import Surroundings
from kvchat.tui.history import PromptHistory
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.suggestions import SuggestionList


class Composer(Vertical):
    """``surroundings`` tells what is in force when something is typed."""

    DEFAULT_CSS = "Composer { height: auto; }"

    def __init__(self, history: PromptHistory, surroundings: Callable[[], Surroundings]) -> None:
        super().__init__()
        self._surroundings = surroundings
        self._list = SuggestionList()
        self._prompt = Prompt(history, self._list, self.suggest)

    def compose(self) -> ComposeResult:
        yield self._list
        yield self._prompt

    def suggest(self) -> None:
        """Bring the list up to date with what is typed before the cursor."""
        begun = self._prompt.begun
        self._list.show(command_offers.offer(begun, self._surroundings()) if begun else None)

    def on_text_area_changed(self, message: TextArea.Changed) -> None:
        message.stop()
        self.suggest()

    def on_text_area_selection_changed(self, message: TextArea.SelectionChanged) -> None:
        message.stop()
        self.suggest()

    def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        """A click takes a suggestion."""
        message.stop()
        self._prompt.take_suggestion()
