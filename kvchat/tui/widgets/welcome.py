"""The first screen, with examples to begin with, and the column of saved conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from textual import on
from textual.content import Content
from textual.style import Style
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvchat.conversations.store import Summary
from kvchat.foreign_text import visible
from kvchat.paths import BUNDLED, is_server
from kvchat.tui.actions import FIRST_KEYS

ABOUT_BUNDLED = (
    "The bundled model is tiny (17M): it remembers what it is told, finds facts in long texts, tells short stories and"
    " explains the KV modes. It has no world knowledge and writes no code; -m MODEL loads another."
)
EXAMPLES = {
    True: (
        "My cat is called Biscuit. Tell me a story.",
        "Tell me a story about a lighthouse.",
        "How does speculative mode work?",
    ),
    False: (
        "My cat is called Biscuit. Tell me a short story.",
        "What is a KV cache? Answer in three sentences.",
        "Write four lines about a lighthouse.",
    ),
}
ROOM_FOR_KEYS = 36  # rows of the terminal that the first screen needs to list keys too
NONE_SAVED = Option("none saved yet", disabled=True)
NEEDLE = "/needle"
ABOUT_NEEDLE = "Hide a fact in a long text and ask every mode for it."


def example(typed: str, model: str) -> str | None:
    """Return the example that ``typed`` chooses on the first screen: its number, or "" for the first; else None."""
    examples = (*EXAMPLES[model == BUNDLED], *([] if is_server(model) else [NEEDLE]))
    return examples[int(typed or 1) - 1] if typed in ("", *map(str, range(1, len(examples) + 1))) else None


class Welcome(Static):
    """Shown in an empty conversation, with examples to click on, or before ``recording`` is replayed."""

    DEFAULT_CSS = "Welcome { margin: 1 2; color: $text-muted; }"

    def __init__(self, model: str, key: Callable[[str], str], recording: str = "") -> None:
        """``key`` returns the current key of an action's id."""
        super().__init__(markup=False)
        self._recording = recording
        self._model = model
        self._key = key
        self._offer = ""

    def on_mount(self) -> None:
        self.update(self._content())

    def suit(self, model: str) -> None:
        """Show the examples for another model."""
        self._model = model
        self.update(self._content())

    def offer(self, title: str) -> None:
        self._offer = f"\n\n{self._key('last')} continues “{visible(title)}”"
        self.update(self._content())

    def _content(self) -> Content:
        if self._recording:
            return Content(
                f"{visible(self._recording)} is a recording and starts in a moment; there is no model to answer."
                f"\n\n{self._key('replay.pause')} pauses it, {self._key('replay.faster')} plays it faster,"
                f" {self._key('replay.slower')} slower. {self._key('help')} says what the figures mean;"
                " `kvchat` alone starts a chat."
            )
        is_here = not is_server(self._model)
        examples = (*EXAMPLES[self._model == BUNDLED], *([ABOUT_NEEDLE] if is_here else []))
        rows = [
            Content.assemble(
                (f" {number} ", "bold $accent"),
                (f" {text}\n", Style.from_meta({"@click": f"screen.ask_example('{number}')"})),
            ).stylize("$foreground")
            for number, text in enumerate(examples, 1)
        ]
        about = f"{ABOUT_BUNDLED}\n\n" if self._model == BUNDLED else ""
        modes = (
            f" The whole conversation stays in memory; {self._key('mode.next')} changes how much of it the model reads,"
            " even during an answer."
        )
        keys = (
            f"\nPress {self._key('prompt.send')} to ask the first, or a number and {self._key('prompt.send')}."
            f"{modes if is_here else ''} {self._key('help')} lists all keys and commands."
        )
        return Content.assemble(about, *rows, keys, self._offer, *self._first_keys())

    def _first_keys(self) -> Iterator[str | tuple[str, str]]:
        """Yield the keys to begin with, if there is room for them."""
        if self.app.size.height < ROOM_FOR_KEYS:
            return
        keys = {id: self._key(id).split(" / ")[0] for id in FIRST_KEYS}
        width = max(map(len, keys.values()))
        yield "\n"
        for id, words in FIRST_KEYS.items():
            yield f"\n {keys[id]:<{width}}", "bold $primary"
            yield f"  {words}"

    def on_resize(self) -> None:
        """Draw again: the keys may fit now, or no longer."""
        self.update(self._content())


class ConversationColumn(OptionList, can_focus=False):
    """The titles of saved conversations with a mark on the current one; clicking one opens it."""

    DEFAULT_CSS = """
    ConversationColumn {
        width: 30; height: 100%; padding: 0 1; border: none; border-top: solid $foreground 15%; background: $surface;
        border-title-color: $primary; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis;
        scrollbar-size-vertical: 1;
    }
    """

    def __init__(self) -> None:
        super().__init__()  # empty until it is known what is saved
        self.border_title = " conversations "
        self._titles: dict[str, str] = {}
        self._current = ""

    def show(self, saved: Sequence[Summary], current: str) -> None:
        """List saved conversations; ``current`` is the id of the one on the screen, which may not be saved yet."""
        titles = {summary.id: visible(summary.title or "(no title)") for summary in saved}
        self._current = current
        if not self.option_count or list(titles.items()) != list(self._titles.items()):
            self._titles = titles
            self.set_options([Option(Content(title), id) for id, title in titles.items()] or [NONE_SAVED])
        self._mark()

    @on(OptionList.OptionSelected)
    def _mark(self) -> None:
        """Mark the current conversation, also after a click on another until that is open."""
        self.highlighted = list(self._titles).index(self._current) if self._current in self._titles else None
