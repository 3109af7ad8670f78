"""The prompt, and above it the list of suggestions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import OptionList, TextArea

from kvchat.tui import command_offers
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.prompt.folders import FolderReader
from kvchat.tui.prompt.history import PromptHistory
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.suggestions import SuggestionList


class Composer(Vertical):
    """``surroundings`` tells what is in force when something is typed, ``key`` the key in force of an action's id."""

    DEFAULT_CSS = "Composer { height: auto; }"

    def __init__(
        self, history: PromptHistory, surroundings: Callable[[], Surroundings], key: Callable[[str], str]
    ) -> None:
        super().__init__()
        self._key = key
        self._surroundings = surroundings
        self._list = SuggestionList()
        self._folders = FolderReader(self.suggest)
        self._prompt = Prompt(history, self._list, self.suggest)

    def compose(self) -> ComposeResult:
        yield self._list
        yield self._prompt

    def suggest(self) -> None:
        """Bring the list up to date with what is typed before the cursor."""
        begun = self._prompt.begun
        now = replace(self._surroundings(), entries=self._folders.entries)
        self._list.show(command_offers.offer(begun, now) if begun else None)

    def show_queue(self, waiting: int, is_held: bool) -> None:
        """Show how many questions wait, and whether the user has to release them."""
        self._prompt.has_queue = waiting > 0
        words = f"{waiting} held: {self._key('prompt.send')} sends them" if is_held else f"{waiting} queued"
        self._prompt.border_subtitle = f"{words}, ↑ takes the last one back" if waiting else ""

    def show_editing(self, is_editing: bool, is_answer: bool) -> None:
        """Show what becomes of the text: a question of its own, or one in place of a message."""
        does = "goes on from this answer" if is_answer else "asks"
        title = f"editing: {self._key('prompt.send')} {does} on a new branch, {self._key('stop')} ends it"
        self._prompt.border_title = title if is_editing else ""

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
