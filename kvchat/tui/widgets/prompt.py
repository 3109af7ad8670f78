"""The prompt: Enter sends, Ctrl+J is a newline, Up and Down walk the history at the edges, large pastes fold.

While the list above it is open, Up and Down choose in it, Tab takes a suggestion and Esc closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.geometry import Offset
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from kvchat.conversations.attachments import pieces
from kvchat.foreign_text import typed
from kvchat.tui.actions import bindings, is_command
from kvchat.tui.prompt.history import PromptHistory
from kvchat.tui.prompt.mentions import MENTION, Part
from kvchat.tui.widgets.suggestions import SuggestionList
from kvchat.units import count, size

FOLD_CHARACTERS = 16 * 1024  # TextArea wraps every line it holds: 5 MB would block for many seconds
FOLD_LINES = 24  # two prompts full: more cannot be looked over while writing
STEPS = {"up": -1, "down": 1}


class Prompt(TextArea):
    """A multi-line editor that posts ``Sent`` and is empty then: what is typed meanwhile belongs to the next text.

    The receiver answers each ``Sent`` by ``remember`` or ``give_back``; one of white space stays as it is.
    Control characters become visible marks before they are in the text: what is sent is what was shown.
    ``has_queue`` says whether questions wait.
    """

    DEFAULT_CSS = """
    Prompt { height: auto; min-height: 3; max-height: 10; border: round $foreground 25%; padding: 0 1;
             background: transparent; scrollbar-size-vertical: 1; }
    Prompt:focus { border: round $primary; background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("prompt")

    @dataclass
    class Sent(Message):
        """The user sends what was ``typed``; ``pastes`` holds what was pasted, by the words that stand for it."""

        typed: str
        pastes: dict[str, str] = field(default_factory=dict)

        @property
        def parts(self) -> tuple[Part, ...]:
            """The typed and the pasted parts, in turn."""
            return _parts(self.typed, self.pastes)

        @property
        def text(self) -> str:
            """All parts as one text."""
            return _expanded(self.typed, self.pastes)

        @property
        def is_command(self) -> bool:
            """True if it is a slash command; what was pasted is none."""
            return self.parts[0].is_typed and is_command(self.text)

    class TookBack(Message):
        """The user wants the question queued last back."""

    def __init__(self, history: PromptHistory, suggestions: SuggestionList, suggest: Callable[[], None]) -> None:
        """``suggest`` brings the list of suggestions up to date with the text."""
        super().__init__(soft_wrap=True, show_line_numbers=False, tab_behavior="focus", highlight_cursor_line=False)
        # A blinking cursor repaints twice a second: more than 1 % of a core while nothing happens.
        self.set_reactive(TextArea.cursor_blink, False)
        self.placeholder = "Ask something…   (/ commands, @ file)"
        self.prompts = history
        self._suggestions = suggestions
        self._suggest = suggest
        self._recalled = ""
        self.has_queue = False
        self._pastes: dict[str, str] = {}

    def render_line(self, y: int) -> Strip:
        """A line, where there is a column: Textual fails at a placeholder of none."""
        return super().render_line(y) if self.content_size.width else Strip([])

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """Scroll to the cursor, where there is a line: Textual undoes the text first, and moves the cursor then."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)

    def action_send(self) -> None:
        """Post the text, folded pastes in full."""
        self.post_message(self.Sent(self.text, self._pastes))
        if self.text.strip():
            self._pastes = {}
            self.load_text("")

    def on_text_area_changed(self) -> None:
        """Forget what was pasted as it stands: typed again it may be a command."""
        if not self.text:
            self._pastes = {label: text for label, text in self._pastes.items() if label != text}

    def action_newline(self) -> None:
        """Insert a line break at the cursor."""
        self._replace_via_keyboard("\n", *self.selection)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The typed and the pasted parts, in turn."""
        return _parts(self.text, self._pastes)

    def expanded(self) -> str:
        """The text with every folded paste in full."""
        return _expanded(self.text, self._pastes)

    @property
    def begun(self) -> str:
        """The text before the cursor that can be completed; empty inside a line, and in a text of the history."""
        row, column = self.cursor_location
        if self.text == self._recalled or self.document[row][column:].strip():
            return ""
        if self.text.startswith(tuple(label for label in self._pastes if label.startswith("/"))):
            return ""
        return self.document.get_text_range((0, 0), (row, column))

    def take_suggestion(self) -> None:
        """Put the suggestion highlighted in place of what it completes."""
        suggestion, offer = self._suggestions.suggestion, self._suggestions.offer
        if suggestion and offer:
            row, column = self.cursor_location
            self.replace(suggestion.text, (row, column - len(offer.typed)), (row, column))

    def remember(self, sent: Sent) -> None:
        """Remember what was sent in the history.

        Raises:
            OSError: the history file cannot be written.
        """
        if sent.text.strip():
            self.prompts.add(sent.text)

    def put_aside(self) -> None:
        """Empty the prompt; its text stays in the history.

        Raises:
            OSError: the history file cannot be written.
        """
        text = self.expanded()
        self.load_text("")
        if text.strip():
            self.prompts.add(text)

    def give_back(self, sent: Sent) -> None:
        """Put what was sent back, before what has been typed since."""
        if not sent.text.strip():
            return
        self._pastes |= sent.pastes
        begun = f"\n{self.text}" if self.text else ""
        self._show(sent.typed + begun)

    def load_text(self, text: str) -> None:
        """Replace the text; control characters become visible marks."""
        super().load_text(typed(text))

    def restore(self, text: str) -> bool:
        """Put a text back into the prompt, unless another has been begun; whether it was."""
        if self.text:
            return False
        self.load_text("")
        self.insert(self._fold(typed(text)))
        return True

    def begin(self, text: str) -> None:
        """Type the beginning of a text."""
        self.load_text(text)
        self.move_cursor(self.document.end)
        self.focus()

    def replace_all(self, text: str) -> None:
        """Put another text in place of the one there is."""
        self.load_text("")
        self.restore(text)
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        """Up, or the older prompt at the first line; of an empty prompt first the question queued last."""
        if select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        elif self.has_queue and not self.text:
            self.post_message(self.TookBack())
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
        id = (active.binding.id or "") if active is not None else ""
        if self._steer(event.key, id):
            event.stop()
            event.prevent_default()
        elif active is not None and id.startswith("prompt."):
            event.stop()
            event.prevent_default()
            await self.run_action(active.binding.action)

    def _steer(self, key: str, id: str) -> bool:
        """Give a key to the open list of suggestions; whether it was for it."""
        if key not in ("tab", *STEPS) and id not in ("stop", "prompt.send"):
            return False
        self._suggest()
        if not self._suggestions.display:
            return False
        if id == "stop":
            self._suggestions.close()
        elif key in STEPS and self._suggestions.is_open:
            self._suggestions.move(STEPS[key])
        elif (key == "tab" and self._suggestions.is_open) or (id == "prompt.send" and self._suggestions.takes_enter):
            self.take_suggestion()
        else:
            return False
        return True

    async def _on_paste(self, event: events.Paste) -> None:
        """Insert a paste literally; a large one as a placeholder that is expanded when sent."""
        event.prevent_default()
        event.stop()
        text = typed(event.text.replace("\r\n", "\n").replace("\r", "\n"))  # terminals send a line's end as CR
        shown = self._fold(text)
        if shown == text and (MENTION.search(text) or (text.startswith("/") and self.selection.start == (0, 0))):
            self._pastes[text] = text  # in what is typed it would mean a file or a command
        self._replace_via_keyboard(shown, *self.selection)

    def _fold(self, text: str) -> str:
        """``text`` with labels for the files in it, and as one label where it is long."""
        found = list(pieces(text))
        if any(piece.name for piece in found):
            return "".join(self._label(piece.label, piece.text) if piece.name else piece.text for piece in found)
        lines = text.count("\n") + 1
        if len(text) <= FOLD_CHARACTERS and lines <= FOLD_LINES:
            return text
        amount = size(len(text.encode("utf-8", "replace")))
        return self._label(f"[pasted {amount}, {count(lines)} lines]" if lines > 1 else f"[pasted {amount}]", text)

    def _label(self, label: str, text: str) -> str:
        while self._pastes.get(label, text) != text:
            label = label[:-1] + "+]"
        self._pastes[label] = text
        return label

    def _show(self, text: str) -> None:
        self._recalled = text
        self.load_text(text)
        self.move_cursor(self.document.end)


def _parts(text: str, pastes: dict[str, str]) -> tuple[Part, ...]:
    """The typed and the pasted parts of the text, in turn."""
    parts = [Part(text)]
    for label in sorted(pastes, key=len, reverse=True):
        parts = [piece for part in parts for piece in _split(part, label, pastes[label])]
    return tuple(part for part in parts if part.text) or (Part(text),)


def _split(part: Part, label: str, paste: str) -> list[Part]:
    """A typed part at each ``label``, which stands for a paste."""
    if not part.is_typed:
        return [part]
    pieces = [piece for typed in part.text.split(label) for piece in (Part(typed), Part(paste, is_typed=False))]
    return pieces[:-1]


def _expanded(text: str, pastes: dict[str, str]) -> str:
    return "".join(part.text for part in _parts(text, pastes))
