"""The prompt, and above it a list of suggestions that complete what is being typed.

Enter sends, Ctrl+J inserts a newline, Up and Down at the edges go through the history, large pastes are folded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Offset
from textual.message import Message
from textual.strip import Strip
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from kvchat.conversations.attachments import pieces
from kvchat.errors import UsageError
from kvchat.foreign_text import typed, visible
from kvchat.tui.actions import ACTIONS, ALIASES, COMMANDS, Action, bindings, find_command, is_command
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.prompt.history import PromptHistory, bytes_per_token, estimate
from kvchat.tui.prompt.mentions import MENTION, FolderReader, Offer, Part, Suggestion
from kvchat.units import count, size

COUNT_S = 0.2  # seconds from a change to counting the tokens
FOLD_CHARACTERS = 16 * 1024  # TextArea wraps all its text: 5 MB would block for many seconds
FOLD_LINES = 24  # twice the height of the prompt: more is hard to survey while writing
STEPS = ("up", "down")
MAX_LABEL = 34
PATHS = ("FILE", "PATH")  # arguments that name a file


class Composer(Vertical):
    """``surroundings`` returns what suggestions currently depend on, ``key`` the current key of an action's id."""

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
        """Update the list for the text before the cursor."""
        before = self._prompt.completable
        now = replace(self._surroundings(), entries=self._folders.entries)
        self._list.show(offer(before, now) if before else None)

    def show_queue(self, waiting: int, is_held: bool) -> None:
        self._prompt.has_queue = waiting > 0
        sends = f"{self._key('prompt.send')} sends {'it' if waiting == 1 else 'them'}"
        words = f"{waiting} held: {sends}" if is_held else f"{waiting} queued"
        self._queued = f"{words}, ↑ takes the last one back" if waiting else ""
        self._show_subtitle()

    def show_editing(self, is_editing: bool, is_answer: bool) -> None:
        """Show in the title what sending does while a message is edited."""
        does = "continues this answer" if is_answer else "asks"
        title = f"editing: {self._key('prompt.send')} {does} on a new branch, {self._key('stop')} cancels"
        self._prompt.border_title = title if is_editing else ""

    def on_text_area_changed(self, message: TextArea.Changed) -> None:
        message.stop()
        self.suggest()
        if self._prompt.text:
            self._count_due.resume()
        else:
            self._show_count(0, 0)

    async def _count(self) -> None:
        """Estimate the tokens of the text in a thread: a paste may be long, a file on a slow disk."""
        self._count_due.pause()
        state, parts = self._surroundings().state, self._prompt.written.parts
        if is_command("".join(part.text for part in parts[:1])):
            self._show_count(0, 0)
            return
        path = state.conversation.path
        tokens = await asyncio.to_thread(lambda: estimate(parts, bytes_per_token(path)))
        stored = state.snapshot.total if state.snapshot else 0
        if self._prompt.written.parts == parts:
            self._show_count(tokens, state.info.context - stored if state.info else 0)

    def _show_count(self, tokens: int, room: int) -> None:
        over = f", the context has room for {count(max(room, 0))}" if room and tokens > room else ""
        self._counted = f"≈ {count(tokens, 'token')}{over}" if tokens else ""
        self._show_subtitle()

    def _show_subtitle(self) -> None:
        self._prompt.border_subtitle = " · ".join(filter(None, (self._queued, self._counted)))

    def on_text_area_selection_changed(self, message: TextArea.SelectionChanged) -> None:
        message.stop()
        self.suggest()

    def on_option_list_option_selected(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        self._prompt.take_suggestion()


class Prompt(TextArea):
    """A multi-line editor that posts ``Sent`` and empties itself, so that what is typed next belongs to the next text.

    The receiver answers each ``Sent`` by ``remember`` or ``give_back``. White space is sent but stays in the prompt.
    Control characters are replaced by visible marks on entry, so that what is sent is what was shown.
    ``has_queue`` says whether questions are queued.
    """

    DEFAULT_CSS = """
    Prompt { height: auto; min-height: 3; max-height: 10; border: round $foreground 25%; padding: 0 1;
             background: transparent; scrollbar-size-vertical: 1; }
    Prompt:focus { border: round $primary; background: transparent; }
    Prompt > .text-area--placeholder { color: $text-disabled; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("prompt")

    @dataclass
    class Sent(Message):
        """The user sends the text ``typed``; ``pastes`` maps labels in it to the parts that they stand for."""

        typed: str
        pastes: dict[str, Part] = field(default_factory=dict)

        @property
        def parts(self) -> tuple[Part, ...]:
            """The typed and the pasted parts in order, with labels replaced by the text they stand for."""
            parts = [Part(self.typed)]
            for label in sorted(self.pastes, key=len, reverse=True):
                parts = [piece for part in parts for piece in _split(part, label, self.pastes[label])]
            return tuple(part for part in parts if part.text) or (Part(self.typed),)

        @property
        def text(self) -> str:
            return "".join(part.text for part in self.parts)

        @property
        def is_command(self) -> bool:
            """True for a typed slash command; a pasted one is text."""
            return self.parts[0].is_typed and is_command(self.text)

    class TookBack(Message):
        """The user takes back the last queued question."""

    def __init__(self, history: PromptHistory, suggestions: SuggestionList, suggest: Callable[[], None]) -> None:
        """``suggest`` updates the list of suggestions."""
        super().__init__(soft_wrap=True, show_line_numbers=False, tab_behavior="focus", highlight_cursor_line=False)
        # A blinking cursor repaints twice a second, which takes more than 1 % of a core while nothing happens.
        self.set_reactive(TextArea.cursor_blink, False)
        self.placeholder = "Ask something…   (/ commands, @ file)"
        self.prompts = history
        self._suggestions = suggestions
        self._suggest = suggest
        self._recalled = ""
        self.has_queue = False
        self._pastes: dict[str, Part] = {}

    def render_line(self, y: int) -> Strip:
        """Render a line, empty if the prompt has no width: Textual cannot render a placeholder then."""
        return super().render_line(y) if self.content_size.width else Strip([])

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """Scroll to the cursor, unless its line is gone: undoing changes the text before it moves the cursor."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)

    def action_send(self) -> None:
        self.post_message(self.written)
        if self.text.strip():
            self._pastes = {}
            self.load_text("")

    def on_text_area_changed(self) -> None:
        """Once the prompt is empty, forget unfolded pastes: the same text typed again may be a command."""
        if not self.text:
            self._pastes = {label: part for label, part in self._pastes.items() if label != part.text}

    def action_newline(self) -> None:
        self._replace_via_keyboard("\n", *self.selection)

    @property
    def written(self) -> Sent:
        return self.Sent(self.text, self._pastes)

    @property
    def completable(self) -> str:
        """The text before the cursor; "" if it gets no suggestions: inside a line, or recalled from the history."""
        row, column = self.cursor_location
        if self.text == self._recalled or self.document[row][column:].strip():
            return ""
        if self.text.startswith(tuple(label for label in self._pastes if label.startswith("/"))):
            return ""
        return self.document.get_text_range((0, 0), (row, column))

    def take_suggestion(self) -> None:
        """Replace the text that the highlighted suggestion completes."""
        suggestion, offer = self._suggestions.suggestion, self._suggestions.offer
        if suggestion and offer:
            row, column = self.cursor_location
            self.replace(suggestion.text, (row, column - len(offer.typed)), (row, column))

    def remember(self, sent: Sent) -> None:
        """Add the sent text to the history, as it would be typed."""
        text = "".join(part.text if part.is_typed else mentions.literal(part.text) for part in sent.parts)
        try:
            if text.strip():
                self.prompts.add(text)
        except OSError as error:
            self.app.notify(f"The prompt history cannot be written: {error.strerror}.", severity="warning")

    def clear_to_history(self) -> None:
        """Empty the prompt and add its text to the history."""
        written = self.written
        self.load_text("")
        self.remember(written)

    def give_back(self, sent: Sent) -> None:
        """Restore the sent text, before what has been typed since."""
        if not sent.text.strip():
            return
        self._pastes |= sent.pastes
        self._show(sent.typed + (f"\n{self.text}" if self.text else ""))

    def load_text(self, text: str) -> None:
        """Replace the text; control characters are replaced by visible marks."""
        super().load_text(typed(text))

    def restore(self, text: str, is_typed: bool = False) -> bool:
        """Put a text into the empty prompt; return False if there is another text."""
        if self.text:
            return False
        self.load_text("")
        self.insert(self._fold(typed(text), is_typed))
        return True

    def begin(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)
        self.focus()

    def replace_all(self, text: str) -> None:
        """Replace the text by one that was typed elsewhere; a long one stays literal if there were pastes in it."""
        is_typed = all(part.is_typed for part in self.written.parts)
        self.load_text("")
        self.restore(text, is_typed)
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up; at the first line show the older prompt, but in an empty one first take back a queued question."""
        if select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        elif self.has_queue and not self.text:
            self.post_message(self.TookBack())
        elif (entry := self.prompts.older(self.text)) is not None:
            self._show(entry)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down; at the last line show the newer prompt."""
        if select or not self.cursor_at_last_line:
            super().action_cursor_down(select)
        elif (entry := self.prompts.newer(self.text)) is not None:
            self._show(entry)

    async def _on_key(self, event: events.Key) -> None:
        """Handle the prompt's keys in the order of typing; bindings would run after keys that were typed later."""
        active = self.screen.active_bindings.get(event.key)
        id = (active.binding.id or "") if active is not None else ""
        if self._use_in_list(event.key, id):
            event.stop()
            event.prevent_default()
        elif active is not None and id.startswith("prompt."):
            event.stop()
            event.prevent_default()
            await self.run_action(active.binding.action)

    def _use_in_list(self, key: str, id: str) -> bool:
        """Apply a key to the open list of suggestions; return False if it has another meaning."""
        if key not in ("tab", *STEPS) and id not in ("stop", "prompt.send"):
            return False
        self._suggest()
        if not self._suggestions.display:
            return False
        if id == "stop":
            self._suggestions.close()
        elif key in STEPS and self._suggestions.is_open:
            self._suggestions.move(key)
        elif (key == "tab" and self._suggestions.is_open) or (id == "prompt.send" and self._suggestions.takes_enter):
            self.take_suggestion()
        else:
            return False
        return True

    async def _on_paste(self, event: events.Paste) -> None:
        """Insert a paste literally; a large one as a label that is expanded when sent."""
        event.prevent_default()
        event.stop()
        text = typed(event.text.replace("\r\n", "\n").replace("\r", "\n"))  # terminals send line ends as CR
        row, column = self.selection.start
        files = mentions.dropped(text) if self.document[row][:column].endswith("@") else text
        shown = files if files != text else self._fold(text)
        if shown == text and (MENTION.search(text) or (is_command(text) and self.selection.start == (0, 0))):
            self._pastes[text] = Part(text, is_typed=False)  # as typed text it would name a file or be a command
        self._replace_via_keyboard(shown, *self.selection)

    def _fold(self, text: str, is_typed: bool = False) -> str:
        """Return ``text`` with a label in place of each attached file, or one label for all of it if it is long."""
        found = list(pieces(text))
        if any(piece.name for piece in found):
            files = {piece: self._label(piece.label, Part(piece.text, is_typed=False)) for piece in found if piece.name}
            return "".join(files.get(piece, piece.text) for piece in found)
        lines = text.count("\n") + 1
        if len(text) <= FOLD_CHARACTERS and lines <= FOLD_LINES:
            return text
        amount = size(len(text.encode("utf-8", "replace")))
        label = f"[pasted {amount}, {count(lines)} lines]" if lines > 1 else f"[pasted {amount}]"
        return self._label(label, Part(text, is_typed))

    def _label(self, label: str, part: Part) -> str:
        while self._pastes.get(label, part) != part:
            label = label[:-1] + "+]"
        self._pastes[label] = part
        return label

    def _show(self, text: str) -> None:
        self._recalled = text
        self.load_text(text)
        self.move_cursor(self.document.end)


def _split(part: Part, label: str, paste: Part) -> list[Part]:
    """Split a typed part at each ``label`` and put ``paste`` there."""
    if not part.is_typed:
        return [part]
    pieces = [piece for typed in part.text.split(label) for piece in (Part(typed), paste)]
    return pieces[:-1]


class SuggestionList(OptionList):
    """Shows an ``Offer``, or is hidden; the prompt keeps the focus and moves the highlight."""

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
        return bool(self.display) and self.offer is not None and bool(self.offer.suggestions)

    @property
    def suggestion(self) -> Suggestion | None:
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
        """Show an offer, or hide the list without one; the same offer again keeps the highlight."""
        if offer == self.offer:
            return
        self.offer, self._is_chosen = offer, False
        self.display = offer is not None and bool(offer.suggestions or offer.usage)
        self.clear_options()
        if offer is None:
            return
        if offer.usage:
            self.add_option(Option(Content(visible(offer.usage)), disabled=True))
        width = min(max((len(visible(found.label)) for found in offer.suggestions), default=0), MAX_LABEL)
        self.add_options([Option(_line(found, width)) for found in offer.suggestions])
        is_selected = offer.takes_by_enter or not offer.usage  # otherwise Enter sends the command without a suggestion
        self.highlighted = int(bool(offer.usage)) if is_selected and offer.suggestions else None

    def move(self, step: str) -> None:
        """Move the highlight ``up`` or ``down``; Enter then takes the suggestion."""
        self._is_chosen = True
        getattr(self, f"action_cursor_{step}")()


def _line(suggestion: Suggestion, width: int) -> Content:
    mark = "●" if suggestion.is_current else " "
    label = visible(suggestion.label)
    return Content.assemble(f"{mark} ", (f"{label:<{width}}", "$foreground"), f"  {visible(suggestion.doc)}")


def offer(before: str, now: Surroundings) -> Offer | None:
    """Return suggestions for the end of ``before``, the text before the cursor: commands, arguments or files."""
    if not is_command(before):
        return mentions.offer(before, now.entries)
    name, space, argument = before.removeprefix("/").partition(" ")
    return _argument(name, argument, now) if space else _names(name)


def _names(typed: str) -> Offer | None:
    found = [action for name, action in COMMANDS.items() if name.startswith(typed.lower())]
    found += [action for alias, action in ALIASES.items() if typed and alias.startswith(typed.lower())]
    if not found and len(typed) > 1:
        found = [action for name, action in COMMANDS.items() if typed.lower() in name]
    rows = [_command(action) for action in sorted(ACTIONS, key=attrgetter("rarity")) if action in found]
    is_ambiguous = len(rows) > 1 and typed.lower() not in (*COMMANDS, *ALIASES)
    return Offer(f"/{typed}", tuple(rows), takes_by_enter=is_ambiguous) if rows else None


def _command(action: Action) -> Suggestion:
    others = f"  (also {', '.join(f'/{alias}' for alias in action.aliases)})" if action.aliases else ""
    return Suggestion(f"/{action.command}{' ' * bool(action.usage)}", action.line, action.brief + others)


def _argument(name: str, argument: str, now: Surroundings) -> Offer | None:
    try:
        action = find_command(name.lower())
    except UsageError:
        return None
    if not action.usage:
        return None
    expected = f"{action.line}   {action.doc}"
    if action.usage in PATHS:
        return Offer(argument, tuple(mentions.matching(argument, now.entries)), expected)
    *words, typed = argument.split(" ")
    found = list(action.values(now, list(filter(None, words)))) if action.values else []
    rows = [value for value in found if value.text.lower().startswith(typed.lower())]
    rows = rows or [value for value in found if len(typed) > 1 and typed.lower() in value.text.lower()]
    return Offer(typed, tuple(rows), expected)
