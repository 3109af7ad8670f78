"""The transcript: owns the messages, keeps the newest in sight and only some of them alive.

Every layout visits every mounted widget (25 answers with a table are 600 widgets and 90 ms), and there are up to 20
layouts a second while an answer streams. So answers far from the reader are collapsed to one widget each, and what was
said before the conversation was opened is in chapters, a few messages to a widget, of which those far from the reader
are folded.

In its gutter stands beside each message how much of it the model still reads, in the ribbon's colors. It lies over the
messages' margin: a new snapshot repaints one column and lays nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from kvchat.conversations.attachments import folded
from kvchat.foreign_text import visible
from kvchat.tui.actions import bindings
from kvchat.tui.state import UNFINISHED, Footed, Mark
from kvchat.tui.widgets.answer import Answer, message_widget
from kvchat.tui.widgets.base import PlainText
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.ribbon import CLASSES, GLYPHS

LIVE_WIDGETS = 120
W = TypeVar("W", bound=Widget)
LENGTH = 20  # messages of a chapter at most
NEWEST = 10  # messages that are in none
MarkOf = Callable[[str], Mark | None]
SHADES = "░▒▓█"


class Transcript(VerticalScroll):
    """Anchored at its end until the reader scrolls away; so many lines that came since are then ``below`` the screen.

    While it has the focus a message can be ``chosen``, for the keys that act on one.
    """

    DEFAULT_CSS = """
    Transcript { height: 1fr; scrollbar-size-vertical: 1; padding: 0 0 1 0; background: $background; }
    Transcript .chosen { background: $boost; outline-left: outer $accent; }
    Transcript Question.chosen { outline-left: none; text-style: bold reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings("transcript")

    below: reactive[int] = reactive(0, repaint=False)

    def __init__(self) -> None:
        super().__init__()
        self._left_at: float | None = None
        self._chosen: Question | Answer | None = None
        self._sought: Question | Answer | None = None  # gone to, while what is unfolded around it may still move it
        self._sought_at = Region()

    @property
    def chosen(self) -> str | None:
        return self._chosen.message if self._chosen is not None and self._chosen.is_attached else None

    def choose(self, message: Question | Answer | None) -> None:
        """Choose a message and scroll to it; None for none. One that is gone to is then sought no more."""
        if self._chosen is not None:
            self._chosen.remove_class("chosen")
        self._chosen = message
        if message is not self._sought:
            self._sought = None
        if message is not None:
            message.add_class("chosen")
            self.scroll_to_region(self._place(message), animate=False, immediate=message is self._sought)
        self.refresh_bindings()

    async def go_to(self, id: str) -> bool:
        """Choose a message by its id and take the focus; whether it is here. One in progress has no id yet."""
        if id == UNFINISHED:
            self.jump_to_end()
            return True
        for chapter in self._chapters():
            if chapter.has(id):
                self.scroll_to_widget(chapter, animate=False, immediate=True)
                self._count_below()  # the reader is there: one far from him is folded again
                await chapter.set_folded(False)
        for message, _ in self.places():
            if message.message == id:
                self.focus()
                self._sought = message
                self.call_after_refresh(self.settle)
                return True
        return False

    def places(self) -> Iterator[tuple[Question | Answer, Region]]:
        """The messages but for those in folded chapters, oldest first, and where they lie in what is scrolled."""
        for child in self.children:
            if isinstance(child, Chapter):
                offset = child.virtual_region.offset
                yield from ((message, message.virtual_region.translate(offset)) for message in child.widgets())
            elif isinstance(child, Question | Answer):
                yield child, child.virtual_region

    def action_choose(self, step: int) -> None:
        """Choose the message ``step`` further on; at first the last one."""
        messages = [message for message, _ in self.places() if message.message]
        if not messages:
            return
        if self._chosen in messages:
            place = min(max(messages.index(self._chosen) + step, 0), len(messages) - 1)
        else:
            place = len(messages) - 1
        self.choose(messages[place])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Letters act on a chosen message only; otherwise they are typed."""
        return action != "run" or self.chosen is not None

    async def action_run(self, id: str) -> None:
        await self.run_action(f"screen.run({id!r})")

    def on_blur(self) -> None:
        self.choose(None)  # the keys of a message end with the focus

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, widget: W, before: Widget | None = None) -> W:
        """Mount ``before`` another, else at the end, but before what is to come, unless it is a question that waits."""
        is_waiting = isinstance(widget, Question) and widget.queued
        to_come = next(filter(_is_to_come, self.children), None) if not is_waiting else None
        with self.app.batch_update():
            await self.mount(widget, before=before or to_come)
        if isinstance(widget, Question):
            self.jump_to_end()
        self.call_after_refresh(self.settle)
        return widget

    async def replace_below(self, message: str | None, widgets: Sequence[Widget]) -> None:
        """Put ``widgets`` in place of all below the widget of a message; None: of all there is."""
        self.choose(None)
        kept, added = self._kept(message) if message else 0, list(widgets)
        if message and kept < len(self.children) and isinstance(chapter := self.children[kept], Chapter):
            last = next(number for number, (one, _) in enumerate(chapter.said) if one.id == message)
            added = [Chapter(chapter.said[: last + 1]), *added]
        with self.app.batch_update():
            await self.remove_children(self.children[kept:])
            await self.mount_all(added)
        self.jump_to_end()
        self.call_after_refresh(self.settle)

    def show_footer(self, message: str, footer: str) -> None:
        for chapter in self._chapters():
            chapter.show_footer(message, footer)
        for shown, _ in self.places():
            if shown.message == message:
                shown.show_footer(footer)

    def jump_to_end(self) -> None:
        """Show the newest and follow it again."""
        self.scroll_end(animate=False)
        self.anchor()

    async def settle(self) -> None:
        """After a new message or scrolling: count what is out of sight; collapse and revive answers, fold chapters."""
        self._count_below()
        has_changed = await self._settle_answers() | await self._settle_chapters()
        if self._sought is not None and not self._sought.is_attached:
            self._sought = None
        if self._sought is not None and self._sought.virtual_region.height:
            self._approach(self._sought, has_changed)

    async def _settle_answers(self) -> bool:
        answers, has_changed = [(one, place) for one, place in self.places() if isinstance(one, Answer)], False
        live = recent([answer for answer, _ in answers])
        for answer, place in answers[: len(answers) - live]:
            has_changed |= await answer.set_collapsed(self._left_at is None or not self._is_near(place))
        for answer, _ in answers[len(answers) - live :]:
            has_changed |= await answer.set_collapsed(False)
        return has_changed

    async def _settle_chapters(self) -> bool:
        needed, has_changed = {one.message for one in (self._chosen, self._sought) if one and one.is_attached}, False
        for chapter in self._chapters():
            place, is_needed = chapter.virtual_region, any(map(chapter.has, needed))
            if place.height:  # the last layout has seen it
                has_changed |= await chapter.set_folded(not is_needed and not self._is_near(place))
        return has_changed

    def _approach(self, sought: Question | Answer, has_changed: bool) -> None:
        """Choose the message gone to, again until a layout has left it and all around it as they were."""
        place = self._place(sought)
        self.choose(sought)
        if has_changed or place != self._sought_at or any(chapter.is_held for chapter in self._chapters()):
            self._sought_at = place
            self.call_after_refresh(self.settle)
        else:
            self._sought = None

    def _place(self, message: Question | Answer) -> Region:
        return next((place for one, place in self.places() if one is message), Region())

    def on_chapter_grew(self, message: Chapter.Grew) -> None:
        """Keep what is read at its place; a message gone to is then looked for again."""
        message.chapter.is_held = False
        if message.chapter.virtual_region.y < self.scroll_y and self._left_at is not None:
            self.scroll_to(y=self.scroll_y + message.rows, animate=False, immediate=True)
        self.call_after_refresh(self.settle)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Settle after the reader or the end has moved."""
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            following = self._left_at is None and self.is_vertical_scroll_end
            self.call_after_refresh(self._count_below if following else self.settle)

    async def on_answer_grew(self) -> None:
        """The layout knows the new height only after the next refresh."""
        self.call_after_refresh(self._count_below)

    def _count_below(self) -> None:
        if self.is_vertical_scroll_end:
            self._left_at = None
        elif self._left_at is None:
            self._left_at = self.max_scroll_y
        self.below = 0 if self._left_at is None else max(round(self.max_scroll_y - self._left_at), 0)

    def _is_near(self, place: Region) -> bool:
        """True if it is less than a screen from the reader, who is at the end or on the way there until he left it."""
        seen = self.max_scroll_y if self._left_at is None else self.scroll_y
        top, height = seen - self.size.height, 3 * self.size.height
        return place.bottom > top and place.y < top + height

    def _chapters(self) -> list[Chapter]:
        return [child for child in self.children if isinstance(child, Chapter)]

    def _kept(self, message: str) -> int:
        """Number of children above a chapter that has the message, or ending with it."""
        for index in reversed(range(len(self.children))):
            child = self.children[index]
            if isinstance(child, Chapter) and child.has(message):
                return index
            if getattr(child, "message", None) == message:
                return index + 1
        return 0


def _is_to_come(widget: Widget) -> bool:
    """True of a queued question, and of an answer until its first word: what is told before that stands above it."""
    if isinstance(widget, Question):
        return widget.queued
    return isinstance(widget, Answer) and not (widget.finished or widget.text)


def recent(answers: Sequence[Answer]) -> int:
    """Number of answers at the end that stay alive: as many as ``LIVE_WIDGETS`` allow, but at least two."""
    widgets = 0
    for number, answer in enumerate(reversed(answers)):
        widgets += answer.weight
        if widgets > LIVE_WIDGETS and number >= 2:
            return number
    return len(answers)


class NewLines(Static):
    """The chip under the transcript: new lines below, a click goes there."""

    DEFAULT_CSS = """
    NewLines { display: none; height: 1; text-align: right; color: $primary; padding: 0 2; }
    NewLines.some { display: block; }
    NewLines:hover { text-style: underline; }
    """

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self._transcript = transcript

    def on_mount(self) -> None:
        self.watch(self._transcript, "below", self._show)

    def on_click(self) -> None:
        self._transcript.jump_to_end()

    def _show(self, lines: int) -> None:
        self.set_class(lines > 0, "some")
        self.update(f"▾ {lines} new line{'s' * (lines != 1)} below", layout=False)


class TranscriptPane(Vertical):
    """The transcript with the chip for new lines under it."""

    DEFAULT_CSS = "TranscriptPane { width: 1fr; layers: base above; }"

    def compose(self) -> ComposeResult:
        transcript = Transcript()
        yield transcript
        yield Gutter(transcript)
        yield NewLines(transcript)


class Chapter(Vertical):
    """Some messages: while it is ``folded`` one plain text, about as high as they are.

    Its height ``is_held`` from then on until whoever hears ``Grew`` has moved along with it, and says so.
    """

    DEFAULT_CSS = """
    Chapter { height: auto; }
    Chapter > PlainText { padding: 0 2 0 3; color: $text-muted; }
    """

    @dataclass
    class Grew(Message):
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
            yield from (message_widget(message, footer) for message, footer in self.said)

    def widgets(self) -> Iterator[Question | Answer]:
        """Those of its messages, none while it is folded."""
        return (child for child in self.children if isinstance(child, Question | Answer))

    def has(self, id: str) -> bool:
        return any(message.id == id for message, _ in self.said)

    def show_footer(self, id: str, footer: str) -> None:
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
    return [*reversed(chapters), *(message_widget(message, footer) for message, footer in messages[rest:])]


def shade(mark: Mark) -> str:
    """The glyph of a message: the fuller, the more of it is read."""
    if mark.share <= 0:
        return GLYPHS.get(mark.letter, GLYPHS["H"])
    return SHADES[min(int(mark.share * len(SHADES)), len(SHADES) - 1)]


class Gutter(Widget):
    """One column at the left edge of a transcript."""

    DEFAULT_CSS = "Gutter { width: 1; height: 1fr; dock: left; layer: above; background: $background; }"

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self._transcript = transcript
        self._mark_of: MarkOf | None = None
        self._rows: list[Mark | None] = []

    def on_mount(self) -> None:
        for name in ("scroll_y", "virtual_size"):
            self.watch(self._transcript, name, self._draw, init=False)
        # Messages of a transcript that is not full yet move without either of them.
        self.screen.screen_layout_refresh_signal.subscribe(self, lambda _: self._draw())

    def on_resize(self) -> None:
        """As high as it is now: while a prompt is read no snapshot comes that would draw it again."""
        self._draw()

    def show(self, mark_of: MarkOf | None) -> None:
        """Show what is read of each message, by its id; asked for those in sight, None for none."""
        self._mark_of = mark_of
        self._draw()

    def _draw(self) -> None:
        rows: list[Mark | None] = [None] * self.size.height
        top, mark_of = round(self._transcript.scroll_y), self._mark_of
        for message, place in self._transcript.places() if mark_of else ():
            first, end = max(place.y - top, 0), min(place.bottom - top, len(rows))
            if first < end and mark_of and not message.has_class("queued"):
                rows[first:end] = [mark_of(message.message)] * (end - first)
        if rows != self._rows:
            self._rows = rows
            self.refresh()

    def render(self) -> Content:
        styled = [(shade(mark), f"$ribbon-{CLASSES.get(mark.letter, 'host')}") if mark else " " for mark in self._rows]
        return Content("\n").join(map(Content.assemble, styled))
