"""An answer in the transcript, and the widgets of earlier messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message as WidgetMessage
from textual.widgets import Static

from kvchat import thoughts
from kvchat.conversations.conversation import Message, ModeChange, notes, with_marks
from kvchat.foreign_text import visible
from kvchat.protocol.messages import Switched
from kvchat.tui.state import SwitchLine
from kvchat.tui.widgets.base import Paced, PlainText
from kvchat.tui.widgets.messages import Question

if TYPE_CHECKING:
    from textual.css.query import DOMQuery

    from kvchat.tui.widgets.answer_body import AnswerBody

COMPLETE = ("eos", "stop", "length", "context")  # endings of an answer that was not cut off


class Line(Static):
    """A line that belongs to an answer but not to its text; hidden while it is empty."""

    def __init__(self, text: str, classes: str) -> None:
        super().__init__(text, classes=classes, markup=False)
        self.display = bool(text)

    def show(self, text: str) -> None:
        if text != self.content:  # an update costs a layout
            self.update(text)
            self.display = bool(text)


class Answer(Vertical):
    """One answer, streamed as Markdown; while ``collapsed`` it is a single plain widget of the same height.

    ``text`` is exactly what the engine sent; control characters are made ``visible`` when it is drawn.
    ``weight`` is the number of widgets that it consists of unless it is collapsed.
    """

    DEFAULT_CSS = """
    Answer { height: auto; margin: 1 1 0 1; border-left: outer $primary; padding: 0 0 0 1; }
    Answer.stopped { border-left: outer $warning; }
    Answer > .tail { color: $text; }
    Answer > .tail.waiting { color: $text-muted; }
    Answer > .receipt { color: $text-muted; }
    Answer > .switches { color: $secondary; }
    Answer > .thought { color: $text-muted; }
    Answer > .thoughts { display: none; color: $text-muted; padding: 0 0 1 2; }
    """

    class Grew(WidgetMessage):
        """More of the answer is on screen."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.thought = ""
        self._ending: str | None = None
        self.message = ""
        self.receipt = ""
        self.collapsed = False
        self.finished = False
        self.weight = 1
        self._switch_lines: tuple[ModeChange, ...] = ()  # of the message; they no longer change
        self._marks: list[SwitchMark] = []  # of switches since then, whose lines still change
        self._drawing = asyncio.Lock()
        self._paced = Paced(self, self._grow)

    def compose(self) -> ComposeResult:
        thought, reply = self._parts()
        if self.collapsed:
            yield PlainText(reply)
            return
        from kvchat.tui.widgets.answer_body import AnswerBody  # takes 40 ms, which would delay the first paint

        yield Line(thoughts.summarize(thought, is_open=False) if thought else "", "thought")
        yield Static(thought, classes="thoughts", markup=False)
        yield AnswerBody()
        yield Line("" if self.finished else "…", "tail waiting")
        yield Line(self._switches(), "switches")
        yield Line(self.receipt, "receipt")

    def wait(self, words: str) -> None:
        if not self.text:
            self._show_tail(words, waiting=True)

    def resume(self, message: Message) -> None:
        self._switch_lines, self.thought = message.switch_lines, message.thought
        self.feed(message.text)

    def feed(self, text: str) -> None:
        """Append text, to be drawn soon."""
        self.text += text
        self._paced.request()

    def mark(self, switched: Switched, speed: float | None) -> SwitchMark:
        """Mark a switch at the current end of the text."""
        self._marks.append(mark := SwitchMark(self, switched, speed))
        self.redraw()
        return mark

    def redraw(self) -> None:
        """Draw the text again because its marks have changed."""
        self._paced.request()

    def remove_mark(self, mark: SwitchMark) -> None:
        self._marks.remove(mark)
        self.redraw()

    async def withdraw(self, chars: int) -> str:
        kept = len(self.text) - chars
        self.text, withdrawn = self.text[:kept], self.text[kept:]
        await self._draw()
        return withdrawn

    @classmethod
    def past(cls, message: Message, footer: str) -> Answer:
        """Return the widget of an earlier answer, collapsed until the reader scrolls near it."""
        answer = cls()
        answer._set_message(message, footer)
        answer.collapsed = True
        answer.weight = 4 + message.text.count("\n")  # at most a block per line; exact once the text is parsed
        return answer

    def _set_message(self, message: Message, footer: str) -> None:
        self.message, self.text, self.receipt, self.finished = message.id, message.text, footer, True
        self._switch_lines, self._marks = message.switch_lines, []
        self.thought, self._ending = message.thought, message.ending
        self.set_class(message.ending not in COMPLETE, "stopped")

    async def finish(self, message: Message, footer: str) -> None:
        """Show the complete answer, parsed again as a whole, with the line ``footer`` under it."""
        self._set_message(message, footer)
        thought, reply = self._parts()
        self._show_thought(thought, is_open=False)
        async with self._drawing:
            await self._show_body(reply, is_final=True)
        if not self.is_attached:  # the conversation was closed meanwhile
            return
        self._show_line("switches", self._switches())
        self._show_tail("" if self.text.strip() else "(no text)", waiting=True)
        self.show_footer(footer)
        self._count_widgets()
        self.post_message(self.Grew())

    def show_footer(self, footer: str) -> None:
        """Replace the line under the answer; a collapsed answer shows it after it is expanded."""
        self.receipt = footer
        self._show_line("receipt", footer)

    async def set_collapsed(self, collapsed: bool) -> bool:
        """Swap the Markdown blocks for one plain widget of the same height, or back; return whether it was swapped.

        The height stays fixed until the blocks are mounted: an earlier layout would show the answer empty and move
        everything below it. An answer is not swapped while it is unfinished, not mounted (its widgets would be composed
        twice), or without a height because it has no layout yet.
        """
        async with self._drawing:
            if collapsed == self.collapsed or not self.finished or not self.is_mounted:
                return False
            if collapsed and not self.size.height:
                return False
            if collapsed:
                self.styles.height = self.size.height
            self.collapsed = collapsed
            await self.recompose()
            if not collapsed and await self._show_body(self._parts()[1], is_final=True):
                self.styles.height = "auto"
                self._count_widgets()
        return True

    def _parts(self) -> tuple[str, str]:
        """Return the thought and the reply with the marks of switches, as they are drawn."""
        return thoughts.split(
            visible(with_marks(self.text, self._changes(), self.finished)), self.thought, self._ending
        )

    def _changes(self) -> list[ModeChange]:
        return [*self._switch_lines, *(ModeChange(mark.chars, mark.line) for mark in self._marks)]

    def _switches(self) -> str:
        return visible("\n".join(notes(self._changes())))

    def _show_line(self, name: str, text: str) -> None:
        for line in self.query(f".{name}").results(Line):
            line.show(text)

    async def _grow(self) -> None:
        if not self.collapsed:
            await self._draw()
            self.post_message(self.Grew())

    async def _draw(self) -> None:
        """Draw the text that was added since the last drawing; everything if earlier text has changed."""
        thought, reply = self._parts()
        self._show_thought(thought, is_open=not reply and not self.finished)
        self._show_line("switches", self._switches())
        async with self._drawing:
            if (body := await self._show_body(reply, self.finished)) and not self.finished and self.text:
                self._show_tail(body.tail)

    async def _show_body(self, reply: str, is_final: bool) -> AnswerBody | None:
        """Draw the blocks; return None if the answer is being removed: its children go first."""
        bodies: DOMQuery[AnswerBody] = self.query("AnswerBody")  # type: ignore[assignment]
        if not bodies:
            return None
        await (body := bodies.first()).show(reply, is_final)
        return body if self.is_attached else None

    def _show_thought(self, thought: str, is_open: bool) -> None:
        if thought:
            self._show_line("thought", thoughts.summarize(thought, is_open))
            self.query_one(".thoughts", Static).update(thought)

    def _count_widgets(self) -> None:
        self.weight = sum(1 for _ in self.walk_children())

    def _show_tail(self, text: str, waiting: bool = False) -> None:
        self.query(".tail").set_class(waiting, "waiting")
        self._show_line("tail", text.rstrip("\n") if text.strip() else "")


class SwitchMark(SwitchLine):
    """A switch in the middle of an answer, after ``chars`` characters of it."""

    def __init__(self, answer: Answer, switched: Switched, speed: float | None) -> None:
        super().__init__(switched, speed)
        self.chars = len(answer.text)
        self._answer = answer

    def show_line(self) -> None:
        self._answer.redraw()

    async def remove(self) -> None:
        self._answer.remove_mark(self)


def message_widget(message: Message, footer: str) -> Question | Answer:
    if message.role == "assistant":
        return Answer.past(message, footer)
    question = Question(message.text)
    question.send(message, footer)
    return question
