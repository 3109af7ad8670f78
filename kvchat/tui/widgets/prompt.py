"""The prompt: Enter sends, Ctrl+J is a newline, Up and Down walk the history at the edges, large pastes fold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea

from kvchat.foreign_text import visible
from kvchat.tui.actions import bindings
from kvchat.tui.history import PromptHistory
from kvchat.units import size

FOLD_CHARACTERS = 16 * 1024  # TextArea wraps every line it holds: 5 MB would block for many seconds


class Prompt(TextArea):
    """A multi-line editor that posts ``Sent`` and is empty then: what is typed meanwhile belongs to the next text.

    The receiver answers each ``Sent`` by ``accept`` or ``give_back``, but one of white space, which stays as it is.
    Control characters become visible marks before they are in the text: what is sent is what was shown.
    """

    DEFAULT_CSS = """
    Prompt { height: auto; min-height: 3; max-height: 10; border: round $foreground 25%; padding: 0 1;
             background: transparent; scrollbar-size-vertical: 1; }
    Prompt:focus { border: round $primary; background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("prompt")

    @dataclass
    class Sent(Message):
        """The user sends this text, pastes expanded."""

        text: str

    def __init__(self, history: PromptHistory, id: str | None = None) -> None:
        super().__init__(
            id=id, soft_wrap=True, show_line_numbers=False, tab_behavior="focus", highlight_cursor_line=False
        )
        self.placeholder = "Ask something…   (/ for commands)"
        self.prompts = history
        self._pastes: dict[str, str] = {}
        self._sent: deque[tuple[str, dict[str, str]]] = deque()

    def action_send(self) -> None:
        """Post the text, folded pastes in full."""
        self.post_message(self.Sent(self.expanded()))
        if self.text.strip():
            self._sent.append((self.text, self._pastes))
            self._pastes = {}
            self.load_text("")

    def action_newline(self) -> None:
        """Insert a line break at the cursor."""
        self._replace_via_keyboard("\n", *self.selection)

    def expanded(self) -> str:
        """The text with every folded paste in full."""
        return _expanded(self.text, self._pastes)

    def accept(self) -> None:
        """Remember the text sent first in the history; nothing was sent by keys where the application asks by itself.

        Raises:
            OSError: the history file cannot be written.
        """
        if self._sent:
            self.prompts.add(_expanded(*self._sent.popleft()))

    def give_back(self) -> None:
        """Put the text sent first back, before what has been typed since."""
        text, pastes = self._sent.popleft()
        self._pastes |= pastes
        begun = f"\n{self.text}" if self.text else ""
        self._show(text + begun)

    def load_text(self, text: str) -> None:
        """Replace the text; control characters become visible marks."""
        super().load_text(visible(text))

    def restore(self, text: str) -> bool:
        """Put a text back into the prompt, unless another has been begun; whether it was."""
        if self.text:
            return False
        self.load_text("")
        self.insert(self._fold(visible(text)))
        return True

    def action_cursor_up(self, select: bool = False) -> None:
        """Up, or the older prompt at the first line."""
        if select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        elif (entry := self.prompts.older(self.text)) is not None:
            self._show(entry)

    def action_cursor_down(self, select: bool = False) -> None:
        """Down, or the newer prompt at the last line."""
        if select or not self.cursor_at_last_line:
            super().action_cursor_down(select)
        elif (entry := self.prompts.newer()) is not None:
            self._show(entry)

    async def _on_key(self, event: events.Key) -> None:
        """Send and newline in the order of the keys; a binding would run after keys that were typed later."""
        active = self.screen.active_bindings.get(event.key)
        if active is not None and (active.binding.id or "").startswith("prompt."):
            event.stop()
            event.prevent_default()
            await self.run_action(active.binding.action)

    async def _on_paste(self, event: events.Paste) -> None:
        """Insert a paste literally; a large one as a placeholder that is expanded when sent."""
        event.prevent_default()
        event.stop()
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")  # terminals send a line's end as CR
        self._replace_via_keyboard(self._fold(visible(text)), *self.selection)

    def _fold(self, text: str) -> str:
        if len(text) <= FOLD_CHARACTERS:
            return text
        label = f"[pasted {_megabytes(len(text))}]"
        while self._pastes.get(label, text) != text:
            label = label[:-1] + "+]"
        self._pastes[label] = text
        return label

    def _show(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)


def _expanded(text: str, pastes: dict[str, str]) -> str:
    for label, paste in pastes.items():
        text = text.replace(label, paste)
    return text


def _megabytes(characters: int) -> str:
    return f"{characters / 1e6:.1f} MB" if characters >= 1e6 else size(characters).replace("KiB", "KB")
