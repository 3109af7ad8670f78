"""Questions, notes and errors in the transcript."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.widgets import Static

from kvchat.conversations.attachments import folded
from kvchat.conversations.conversation import Message
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.protocol.messages import Switched
from kvchat.tui.state import SwitchLine
from kvchat.tui.view import Remedy
from kvchat.units import size

SHOWN_CHARACTERS = 2000
SHOWN_LINES = 12


class Question(Static):
    """A user's question, with attached files folded; a very long one shows only its beginning and size."""

    DEFAULT_CSS = """
    Question { margin: 1 1 0 1; padding: 0 0 0 2; color: $accent; text-style: bold; }
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

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw the sign of a question in the padding of its first row, so that all rows are aligned."""
        lines = super().render_lines(crop)
        if lines and not crop.y:
            text = lines[0].crop(2)
            style = next((segment.style for segment in text), None)  # the line filters have changed it, as for NO_COLOR
            lines[0] = Strip.join([Strip([Segment("❯ ", style)]), text])
        return lines

    def send(self, message: Message, footer: str) -> None:
        self.queued = False
        self.message = message.id
        self.remove_class("queued")
        self.show_footer(footer)

    def show_footer(self, footer: str) -> None:
        self._footer = footer
        if self.is_mounted:
            self.update(self._content())

    def _content(self) -> Content:
        whole = folded(self.text)
        shown = "\n".join(whole[:SHOWN_CHARACTERS].split("\n", SHOWN_LINES)[:SHOWN_LINES])
        length = "" if shown == whole else f" … ({size(len(whole.encode('utf-8', 'replace')))})"
        return Content.assemble(
            f"{visible(shown + length)}{'  (queued)' if self.queued else ''}",
            (f"  {self._footer}" if self._footer else "", "dim not bold"),
        )


class Note(Static):
    """A muted text: a switch, a notice, a table of figures."""

    DEFAULT_CSS = "Note { margin: 1 1 0 1; color: $text-muted; }"

    def __init__(self, text: str | Content) -> None:
        super().__init__(text, markup=False)


class SwitchNote(Note, SwitchLine):
    """The line of a switch between two answers."""

    DEFAULT_CSS = "SwitchNote { color: $secondary; }"

    def __init__(self, switched: Switched, speed: float | None) -> None:
        SwitchLine.__init__(self, switched, speed)
        Note.__init__(self, self.line)

    def show_line(self) -> None:
        self.update(self.line)


class Problem(Static):
    """An error: title, detail, hint, and remedies to click on."""

    DEFAULT_CSS = "Problem { margin: 1 1 0 1; padding: 0 1; border-left: outer $error; }"

    def __init__(self, error: KvchatError, remedies: Sequence[Remedy] = ()) -> None:
        self.error = error
        title, detail, hint = map(visible, (error.title, error.detail, error.hint))
        parts = [Content.styled(f"✖ {title}", "bold $error"), Content(detail), Content.styled(hint, "dim")]
        parts += [
            Content.assemble(
                ("→ ", "bold $accent"),
                (" ".join(remedy.lines), Style.from_meta({"@click": f"screen.run_lines({remedy.lines})"})),
                (f"   {remedy.doc}", "dim"),
            )
            for remedy in remedies
        ]
        super().__init__(Content("\n").join(part for part in parts if part), markup=False)
