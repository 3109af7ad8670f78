"""The parts of the transcript: questions, streamed answers, notes and error blocks."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message as WidgetMessage
from textual.timer import Timer
from textual.widgets import Static

from kvchat.conversations.conversation import Message
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.protocol.messages import Switched
from kvchat.tui import flush
from kvchat.units import count, figure, size

if TYPE_CHECKING:
    from textual.widgets import Markdown

SHOWN_CHARACTERS = 4000
COMPLETE = ("eos", "stop", "length", "context")  # endings of an answer that nothing cut short
SETTLED_TOKENS = 64
TIMED_S = 0.2  # text that waited comes all at once: over less time no speed can be told from it


class Question(Static):
    """A question of the user; a very long one shows its beginning and its size."""

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
        self.message, self._footer = message.id, footer
        self.remove_class("queued")
        if self.is_mounted:
            self.update(self._content())

    def _content(self) -> Content:
        shown = visible(self.text[:SHOWN_CHARACTERS])
        more = f" … ({size(len(self.text.encode('utf-8', 'replace')))})" if len(self.text) > SHOWN_CHARACTERS else ""
        body = shown.replace("\n", "\n  ") + more + ("  (queued)" if self.queued else "")
        return Content.assemble(f"❯ {body}", (f"  {self._footer}" if self._footer else "", "dim not bold"))


def past_message(message: Message, footer: str) -> Question | Answer:
    """The widget of a message that was said before."""
    if message.role == "assistant":
        return Answer.past(message, footer)
    question = Question(message.text)
    question.send(message, footer)
    return question


class Note(Static):
    """A quiet line: a switch, a notice, a table of numbers."""

    DEFAULT_CSS = "Note { margin: 1 1 0 1; color: $text-muted; }"

    def __init__(self, text: str | Content, id: str | None = None) -> None:
        super().__init__(text, id=id, markup=False)


class SwitchNote(Note):
    """A live switch: ``── full -> speculative · 14,203 tok · 41 -> 58 tok/s ──``; the second figure comes later."""

    DEFAULT_CSS = "SwitchNote { color: $secondary; }"

    def __init__(self, switched: Switched, speed_before: float | None) -> None:
        self.switched = switched
        self.settled = False
        self._before = speed_before
        self._tokens = 0
        self._begun: float | None = None
        super().__init__(self._line(None))

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
        s = self.switched
        name = s.mode if s.before == s.mode else f"{s.before} -> {s.mode}"
        parts = [name, *(f"{key} {value}" for key, value in s.params.items() if key == "budget" and value)]
        parts.append(f"{count(s.total)} tok")
        speeds = [figure(speed) for speed in (self._before, after) if speed is not None]
        if speeds:
            parts.append(" -> ".join(speeds) + " tok/s")
        if s.moved_bytes:
            parts.append(f"moved {size(s.moved_bytes)}")
        if s.reduced_tokens:
            parts.append(f"{count(s.reduced_tokens)} tok computed with less context, /rebuild recomputes them")
        return f"── {' · '.join(parts)} ──"


class Problem(Static):
    """An error: title, detail, hint."""

    DEFAULT_CSS = "Problem { margin: 1 1 0 1; padding: 0 1; border-left: outer $error; }"

    def __init__(self, error: KvchatError) -> None:
        self.error = error
        title, detail, hint = map(visible, (error.title, error.detail, error.hint))
        parts = [Content.styled(f"✖ {title}", "bold $error"), Content(detail), Content.styled(hint, "dim")]
        super().__init__(Content("\n").join(part for part in parts if part), markup=False)


class Answer(Vertical):
    """One answer, streamed as Markdown. ``collapsed`` it is one plain widget of the same height.

    It owns its text, which is the engine's to the byte; what is drawn of it is ``visible``.
    ``weight`` counts the widgets it is made of while it is not collapsed.
    """

    DEFAULT_CSS = """
    Answer { height: auto; margin: 1 1 0 1; border-left: outer $primary; padding: 0 0 0 1; }
    Answer.stopped { border-left: outer $warning; }
    Answer > Markdown { padding: 0; margin: 0; background: transparent; }
    Answer > .tail { color: $text; }
    Answer > .tail.waiting { color: $text-muted; }
    Answer > .receipt { color: $text-disabled; }
    """

    class Grew(WidgetMessage):
        """More of the answer is on screen."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.message = ""
        self.receipt = ""
        self.collapsed = False
        self.finished = False
        self.weight = 1
        self._open = flush.OpenBlock()
        self._pending = ""
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        if self.collapsed:
            yield Static(visible(self.text), classes="placeholder", markup=False)
            return
        from textual.widgets import Markdown  # 40 ms that the first paint need not wait for

        yield Markdown(visible(self.text) or None, open_links=False)
        tail = Static("" if self.finished else "…", classes="tail waiting", markup=False)
        tail.display = not self.finished
        yield tail
        receipt = Static(self.receipt, classes="receipt", markup=False)
        receipt.display = bool(self.receipt)
        yield receipt

    def wait(self, words: str) -> None:
        """Show what the engine does before the first word."""
        if not self.text:
            self._show_tail(words, waiting=True)

    def feed(self, text: str) -> None:
        """Append text; the next flush draws it."""
        self.text += text
        self._pending += visible(text)
        if self._timer is None:
            self._timer = self.set_timer(flush.SHORTEST_S, self._flush)

    async def withdraw(self, chars: int) -> str:
        """Remove the last ``chars`` characters, also from the screen, and return them."""
        kept = len(self.text) - chars
        self.text, withdrawn = self.text[:kept], self.text[kept:]
        self._open, self._pending = flush.OpenBlock(), ""
        await self._markdown.update(self._open.feed(visible(self.text)))
        self._show_tail(self._open.tail)
        return withdrawn

    @classmethod
    def past(cls, message: Message, footer: str) -> Answer:
        """An answer given before, collapsed until the reader comes near."""
        answer = cls()
        answer._take(message, footer)
        answer.collapsed = True
        answer.weight = 4 + message.text.count("\n")  # a block has a line or more; counted once it is parsed
        return answer

    def _take(self, message: Message, footer: str) -> None:
        self.message, self.text, self.receipt, self.finished = message.id, message.text, footer, True
        self.set_class(message.ending not in COMPLETE, "stopped")

    async def finish(self, message: Message, footer: str) -> None:
        """Show the complete answer, parsed once more as one text, with the line ``footer`` under it."""
        self._take(message, footer)
        if self._timer:
            self._timer.stop()
        await self._markdown.update(visible(self.text))
        self._show_tail("" if self.text.strip() else "(no text)", waiting=True)
        line = self.query_one(".receipt", Static)
        line.update(footer)
        line.display = bool(footer)
        self._weigh()
        self.post_message(self.Grew())

    async def set_collapsed(self, collapsed: bool) -> None:
        """Swap the Markdown blocks for one plain widget of the remembered height, or back."""
        if collapsed == self.collapsed or not self.finished:
            return
        self.styles.height = self.size.height if collapsed else "auto"
        self.collapsed = collapsed
        await self.recompose()
        if not collapsed:
            self._weigh()

    async def _flush(self) -> None:
        self._timer = None
        if self.finished:
            return
        pending, self._pending = self._pending, ""
        begun = perf_counter()
        if closed := self._open.feed(pending):
            await self._markdown.append(closed)
        if self.finished:
            return
        self._show_tail(self._open.tail)
        self.post_message(self.Grew())
        self._timer = self.set_timer(flush.interval(perf_counter() - begun), self._again)

    async def _again(self) -> None:
        self._timer = None
        if self._pending:
            await self._flush()

    @property
    def _markdown(self) -> Markdown:
        markdown: Markdown = self.query_one("Markdown")  # type: ignore[assignment]
        return markdown

    def _weigh(self) -> None:
        self.weight = sum(1 for _ in self.walk_children())

    def _show_tail(self, text: str, waiting: bool = False) -> None:
        for tail in self.query(".tail").results(Static):
            tail.set_class(waiting, "waiting")
            tail.update(text.rstrip("\n"))
            tail.display = bool(text.strip())
