"""Messages said before, a few to a widget: 500 of them, each with widgets of its own, take seconds to mount."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message as WidgetMessage
from textual.widget import Widget

from kvchat.conversations.attachments import folded
from kvchat.foreign_text import visible
from kvchat.tui.state import Footed
from kvchat.tui.widgets.answer import Answer, past_message
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.plain_text import PlainText

LENGTH = 20  # messages of a chapter at most
NEWEST = 10  # messages that are in none


class Chapter(Vertical):
    """Some messages: while it is ``folded`` one plain text, about as high as they are.

    Its height ``is_held`` from then on until whoever hears ``Grew`` has moved along with it, and says so.
    """

    DEFAULT_CSS = """
    Chapter { height: auto; }
    Chapter > PlainText { padding: 0 2 0 3; color: $text-muted; }
    """

    @dataclass
    class Grew(WidgetMessage):
        """``chapter`` is so many rows higher than it was; what is below it has moved."""

        chapter: Chapter
        rows: int

    def __init__(self, said: Sequence[Footed]) -> None:
        super().__init__()
        self.said = list(said)
        self.folded = True
        self.is_held = False

    def compose(self) -> ComposeResult:
        if self.folded:
            yield PlainText("\n\n".join(["", *(visible(folded(message.text)) for message, _ in self.said)]))
        else:
            yield from (past_message(message, footer) for message, footer in self.said)

    def widgets(self) -> Iterator[Question | Answer]:
        """Those of its messages, none while it is folded."""
        return (child for child in self.children if isinstance(child, Question | Answer))

    def has(self, id: str) -> bool:
        """True if the message is one of its own."""
        return any(message.id == id for message, _ in self.said)

    def up_to(self, id: str) -> Chapter:
        """A chapter of its messages that ends with one of them."""
        last = next(number for number, (message, _) in enumerate(self.said) if message.id == id)
        return Chapter(self.said[: last + 1])

    def show_footer(self, id: str, footer: str) -> None:
        """Keep another footer of a message."""
        self.said = [(message, footer if message.id == id else old) for message, old in self.said]

    async def set_folded(self, folded: bool) -> bool:
        """Fold or unfold it; whether that changed anything. One that no layout has seen stays as it is.

        Its height stays until the next layout, in which the view can be moved along.
        """
        if folded == self.folded or not self.size.height:
            return False
        self.styles.height, self.is_held = self.size.height, True
        self.folded = folded
        await self.recompose()
        self.call_after_refresh(self._let_go)
        return True

    def _let_go(self) -> None:
        if not self.is_attached:
            return
        rows = max((child.virtual_region.bottom for child in self.children), default=0)
        if not rows:  # no layout has placed them yet
            self.call_after_refresh(self._let_go)
            return
        self.post_message(self.Grew(self, rows - self.size.height))
        self.styles.height = "auto"


def past(messages: Sequence[Footed]) -> list[Widget]:
    """Widgets of messages said before: one for each of the newest, and chapters of those before, if they are many."""
    rest = len(messages) - NEWEST if len(messages) > NEWEST + LENGTH else 0
    chapters = [Chapter(messages[max(end - LENGTH, 0) : end]) for end in range(rest, 0, -LENGTH)]
    return [*reversed(chapters), *(past_message(message, footer) for message, footer in messages[rest:])]
