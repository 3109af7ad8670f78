"""The parts of the transcript: questions, streamed answers, notes and error blocks."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from kvchat.conversations.attachments import folded
from kvchat.conversations.conversation import Message
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.protocol.messages import Switched
from kvchat.tui.state import describe_switch
from kvchat.tui.ways_out import WayOut
from kvchat.units import count, size

SHOWN_CHARACTERS = 2000
SHOWN_LINES = 12
SETTLED_TOKENS = 64
TIMED_S = 0.2  # text that waited comes all at once: over less time no speed can be told from it


class Question(Static):
    """A question of the user; files in it are folded, a very long one shows its beginning and its size."""

    DEFAULT_CSS = """
    Question { margin: 1 1 0 1; color: $accent; text-style: bold; }
    Question.queued { color: $text-muted; text-style: italic; }
    """

    def __init__(self, text: str, queued: bool = False) -> None:
        super().__init__(classes="queued" if queued else "", markup=False)
        self.text = text
        self.queued = queued
        self.message = ""
        self._footer = ""

    def on_mount(self) -> None:
        self.update(self._content())

    def send(self, message: Message, footer: str) -> None:
        """Show that the question is no longer queued: it is ``message`` now."""
        self.queued = False
        self.message = message.id
        self.remove_class("queued")
        self.show_footer(footer)

    def show_footer(self, footer: str) -> None:
        """Show another footer."""
        self._footer = footer
        if self.is_mounted:
            self.update(self._content())

    def _content(self) -> Content:
        body = visible(_shortened(folded(self.text))).replace("\n", "\n  ")
        return Content.assemble(
            f"❯ {body}{'  (queued)' if self.queued else ''}",
            (f"  {self._footer}" if self._footer else "", "dim not bold"),
        )


def _shortened(text: str) -> str:
    """The beginning of a long text and how long it is."""
    shown = "\n".join(text[:SHOWN_CHARACTERS].split("\n", SHOWN_LINES)[:SHOWN_LINES])
    if shown == text:
        return text
    return f"{shown} … ({count(text.count(chr(10)) + 1)} lines, {size(len(text.encode('utf-8', 'replace')))})"


class Note(Static):
    """A quiet line: a switch, a notice, a table of numbers."""

    DEFAULT_CSS = "Note { margin: 1 1 0 1; color: $text-muted; }"

    def __init__(self, text: str | Content, id: str | None = None) -> None:
        super().__init__(text, id=id, markup=False)


class SwitchNote(Note):
    """A live switch: ``── full -> speculative · 14,203 tok · 41 -> 58 tok/s ──``; the second figure comes later.

    ``after`` are the last words said before it in an answer, which goes on above the note.
    """

    DEFAULT_CSS = "SwitchNote { color: $secondary; }"

    def __init__(self, switched: Switched, speed_before: float | None, after: str = "") -> None:
        self.switched = switched
        self._after = f" · after “{after}”" if after else ""
        self.settled = False
        self._before = speed_before
        self._tokens = 0
        self._begun: float | None = None
        super().__init__(self._line(None))

    @property
    def is_idle(self) -> bool:
        """True if no token has come after the switch."""
        return self._begun is None

    def count(self, tokens: int, now: float) -> None:
        """Count tokens after the switch; ``now`` in seconds. The speed is final after ``SETTLED_TOKENS``."""
        if self.settled:
            return
        if self._begun is None:
            self._begun = now
            return
        self._tokens += tokens
        if self._tokens >= SETTLED_TOKENS:
            self.close(now)

    def close(self, now: float) -> None:
        """Show the speed of the tokens so far; of too few the note stays open for the next answer."""
        if not self.settled and self._begun is not None and self._tokens and now - self._begun >= TIMED_S:
            self.settled = True
            self.update(self._line(self._tokens / (now - self._begun)))

    def _line(self, after: float | None) -> str:
        return f"── {describe_switch(self.switched, self._before, after)}{self._after} ──"


class Problem(Static):
    """An error: title, detail, hint, and what can be done, which a click does."""

    DEFAULT_CSS = "Problem { margin: 1 1 0 1; padding: 0 1; border-left: outer $error; }"

    def __init__(self, error: KvchatError, ways_out: Sequence[WayOut] = ()) -> None:
        self.error = error
        title, detail, hint = map(visible, (error.title, error.detail, error.hint))
        parts = [Content.styled(f"✖ {title}", "bold $error"), Content(detail), Content.styled(hint, "dim")]
        parts += [
            Content.assemble(
                ("→ ", "bold $accent"),
                (" ".join(way.lines), Style.from_meta({"@click": f"screen.run_lines({way.lines})"})),
                (f"   {way.doc}", "dim"),
            )
            for way in ways_out
        ]
        super().__init__(Content("\n").join(part for part in parts if part), markup=False)
