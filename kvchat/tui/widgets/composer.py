"""The prompt, and above it the list of suggestions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import OptionList, TextArea

from kvchat.tui import command_offers
from kvchat.tui.actions import is_command
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.prompt.folders import FolderReader
from kvchat.tui.prompt.history import PromptHistory
from kvchat.tui.prompt.token_count import bytes_per_token, estimate
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.suggestions import SuggestionList
from kvchat.units import count

COUNT_S = 0.2  # after a change the tokens are counted


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
        self._queued = self._counted = ""

    def on_mount(self) -> None:
        self._count_due = self.set_interval(COUNT_S, self._count, pause=True)

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
        self._queued = f"{words}, ↑ takes the last one back" if waiting else ""
        self._show_subtitle()

    def show_editing(self, is_editing: bool, is_answer: bool) -> None:
        """Show what becomes of the text: a question of its own, or one in place of a message."""
        does = "goes on from this answer" if is_answer else "asks"
        title = f"editing: {self._key('prompt.send')} {does} on a new branch, {self._key('stop')} ends it"
        self._prompt.border_title = title if is_editing else ""

    def on_text_area_changed(self, message: TextArea.Changed) -> None:
        message.stop()
        self.suggest()
        if self._prompt.text:
            self._count_due.resume()
        else:
            self._show_count(0, 0)

    async def _count(self) -> None:
        """Estimate the tokens of what is typed, beside the loop: a paste may be long, a file on a slow disk."""
        self._count_due.pause()
        state, parts = self._surroundings().state, self._prompt.parts
        if is_command("".join(part.text for part in parts[:1])):
            self._show_count(0, 0)
            return
        path = state.conversation.path
        tokens = await asyncio.to_thread(lambda: estimate(parts, bytes_per_token(path)))
        stored = state.snapshot.total if state.snapshot else 0
        if self._prompt.parts == parts:
            self._show_count(tokens, state.info.context - stored if state.info else 0)

    def _show_count(self, tokens: int, room: int) -> None:
        over = f", the context has room for {count(max(room, 0))}" if room and tokens > room else ""
        self._counted = f"≈ {count(tokens)} tokens{over}" if tokens else ""
        self._show_subtitle()

    def _show_subtitle(self) -> None:
        self._prompt.border_subtitle = " · ".join(filter(None, (self._queued, self._counted)))

    def on_text_area_selection_changed(self, message: TextArea.SelectionChanged) -> None:
        message.stop()
        self.suggest()

    def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        """A click takes a suggestion."""
        message.stop()
        self._prompt.take_suggestion()
