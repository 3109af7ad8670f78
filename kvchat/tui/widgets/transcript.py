"""The transcript: shows the messages and follows the newest, with few widgets mounted.

Every layout visits every mounted widget (25 answers with a table are 600 widgets and take 90 ms), and a streaming
answer causes up to 20 layouts a second. So answers far from the reader are collapsed to one widget each. Messages from
before the conversation was opened are grouped in chapters, which are folded to one widget each far from the reader.

The gutter shows next to each message how much of it the model still reads, in the ribbon's colors. It covers the
messages' margin, so that a new snapshot repaints one column without a layout.
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
from textual.selection import Selection
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
CHAPTER_LENGTH = 20  # most messages of a chapter
NEWEST = 10  # messages that are never in a chapter
MarkOf = Callable[[str], Mark | None]
SHADES = "░▒▓█"


class Transcript(VerticalScroll):
    """Follows its end until the reader scrolls away; ``below`` then counts the lines added since.

    While it has the focus a message can be ``chosen``, on which some keys act.
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
        self._left_at: float | None = None  # ``max_scroll_y`` when the reader left the end; None before that
        self._chosen: Question | Answer | None = None
        self._target: Question | Answer | None = None  # of ``go_to``, while unfolding chapters may still move it
        self._target_region = Region()

    @property
    def chosen(self) -> str | None:
        return self._chosen.message if self._chosen is not None and self._chosen.is_attached else None

    def choose(self, message: Question | Answer | None) -> None:
        """Choose a message and scroll to it; None chooses none. This ends ``go_to`` for another message."""
        if self._chosen is not None:
            self._chosen.remove_class("chosen")
        self._chosen = message
        if message is not self._target:
            self._target = None
        if message is not None:
            message.add_class("chosen")
            self.scroll_to_region(self._region_of(message), animate=False, immediate=message is self._target)
        self.refresh_bindings()

    async def go_to(self, id: str) -> bool:
        """Choose a message by its id and take the focus; return False if it is not in the transcript.

        For ``UNFINISHED``, the answer in progress, jump to the end.
        """
        if id == UNFINISHED:
            self.jump_to_end()
            return True
        for chapter in self._chapters():
            if chapter.has(id):
                self.scroll_to_widget(chapter, animate=False, immediate=True)
                self._count_below()  # notes that the reader left the end: else the chapter would be folded again
                await chapter.set_folded(False)
        for message, _ in self.message_regions():
            if message.message == id:
                self.focus()
                self._target = message
                self.call_after_refresh(self.settle)
                return True
        return False

    def message_regions(self) -> Iterator[tuple[Question | Answer, Region]]:
        """Yield the messages outside folded chapters, oldest first, each with its region in the scrolled content."""
        for child in self.children:
            if isinstance(child, Chapter):
                offset = child.virtual_region.offset
                yield from ((message, message.virtual_region.translate(offset)) for message in child.widgets())
            elif isinstance(child, Question | Answer):
                yield child, child.virtual_region

    def action_choose(self, step: int) -> None:
        """Choose the message ``step`` after the chosen one; the last one if none is."""
        messages = [message for message, _ in self.message_regions() if message.message]
        if not messages:
            return
        index = last = len(messages) - 1
        if self._chosen in messages:
            index = min(max(messages.index(self._chosen) + step, 0), last)
        self.choose(messages[index])

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the letter keys unless a message is chosen, so that they are typed."""
        return action != "run" or self.chosen is not None

    async def action_run(self, id: str) -> None:
        await self.run_action(f"screen.run({id!r})")

    def on_blur(self) -> None:
        self.choose(None)  # the keys that act on a message need the focus

    def on_mount(self) -> None:
        self.anchor()

    async def add(self, widget: W, before: Widget | None = None) -> W:
        """Mount ``before`` another widget, else at the end; only a queued question goes below pending widgets."""
        pending = next(filter(_is_pending, self.children), None) if not _is_queued(widget) else None
        with self.app.batch_update():
            await self.mount(widget, before=before or pending)
        if isinstance(widget, Question):
            self.jump_to_end()
        self.call_after_refresh(self.settle)
        return widget

    async def replace_below(self, message: str | None, widgets: Sequence[Widget], keeps_queued: bool = False) -> None:
        """Replace everything below a message, or with None everything, by ``widgets``; queued questions may stay."""
        self.choose(None)
        kept, added = self._kept_children(message) if message else 0, list(widgets)
        if message and kept < len(self.children) and isinstance(chapter := self.children[kept], Chapter):
            last = next(number for number, (shown, _) in enumerate(chapter.messages) if shown.id == message)
            added = [Chapter(chapter.messages[: last + 1]), *added]
        removed = [child for child in self.children[kept:] if not (keeps_queued and _is_queued(child))]
        with self.app.batch_update():
            await self.remove_children(removed)
            await self.mount_all(added, before=next(filter(_is_queued, self.children), None))
        self.jump_to_end()
        self.call_after_refresh(self.settle)

    def show_footer(self, message: str, footer: str) -> None:
        for chapter in self._chapters():
            chapter.show_footer(message, footer)
        for shown, _ in self.message_regions():
            if shown.message == message:
                shown.show_footer(footer)

    def jump_to_end(self) -> None:
        """Scroll to the end and follow it again."""
        self.scroll_end(animate=False)
        self.anchor()

    async def settle(self) -> None:
        """After new messages or scrolling: count the lines below, and collapse or expand answers and chapters."""
        self._count_below()
        has_changed = await self._settle_answers() | await self._settle_chapters()
        if self._target is not None and not self._target.is_attached:
            self._target = None
        if self._target is not None and self._target.virtual_region.height:
            self._scroll_to_target(self._target, has_changed)

    async def _settle_answers(self) -> bool:
        shown, has_changed = self.message_regions(), False
        answers = [(answer, region) for answer, region in shown if isinstance(answer, Answer)]
        live = live_count([answer for answer, _ in answers])
        for answer, region in answers[: len(answers) - live]:
            has_changed |= await answer.set_collapsed(self._left_at is None or not self._is_near(region))
        for answer, _ in answers[len(answers) - live :]:
            has_changed |= await answer.set_collapsed(False)
        return has_changed

    async def _settle_chapters(self) -> bool:
        wanted, has_changed = (self._chosen, self._target), False
        needed = {message.message for message in wanted if message and message.is_attached}
        for chapter in self._chapters():
            region, is_needed = chapter.virtual_region, any(map(chapter.has, needed))
            if region.height:  # it had a layout
                has_changed |= await chapter.set_folded(not is_needed and not self._is_near(region))
        return has_changed

    def _scroll_to_target(self, target: Question | Answer, has_changed: bool) -> None:
        """Choose the message of ``go_to``, again after each layout until one moves neither it nor a chapter."""
        region = self._region_of(target)
        self.choose(target)
        if has_changed or region != self._target_region or any(chapter.is_height_fixed for chapter in self._chapters()):
            self._target_region = region
            self.call_after_refresh(self.settle)
        else:
            self._target = None

    def _region_of(self, message: Question | Answer) -> Region:
        return next((region for shown, region in self.message_regions() if shown is message), Region())

    def on_chapter_grew(self, message: Chapter.Grew) -> None:
        """Scroll by as much as a chapter above grew, so that the text being read does not move, and settle."""
        message.chapter.is_height_fixed = False
        if message.chapter.virtual_region.y < self.scroll_y and self._left_at is not None:
            self.scroll_to(y=self.scroll_y + message.rows, animate=False, immediate=True)
        self.call_after_refresh(self.settle)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Settle after scrolling; while the end is followed only count the lines below."""
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            following = self._left_at is None and self.is_vertical_scroll_end
            self.call_after_refresh(self._count_below if following else self.settle)

    async def on_answer_grew(self) -> None:
        """Count the lines below after the next refresh, which computes the new height."""
        self.call_after_refresh(self._count_below)

    def _count_below(self) -> None:
        if self.is_vertical_scroll_end:
            self._left_at = None
        elif self._left_at is None:
            self._left_at = self.max_scroll_y
        self.below = 0 if self._left_at is None else max(round(self.max_scroll_y - self._left_at), 0)

    def _is_near(self, region: Region) -> bool:
        """Return whether ``region`` is within a screen of the rows in view, or of the end if that is followed."""
        seen = self.max_scroll_y if self._left_at is None else self.scroll_y
        top, height = seen - self.size.height, 3 * self.size.height
        return region.bottom > top and region.y < top + height

    def _chapters(self) -> list[Chapter]:
        return [child for child in self.children if isinstance(child, Chapter)]

    def _kept_children(self, message: str) -> int:
        """Return the number of children before the message's chapter, or up to and including its own widget."""
        for index in reversed(range(len(self.children))):
            child = self.children[index]
            if isinstance(child, Chapter) and child.has(message):
                return index
            if getattr(child, "message", None) == message:
                return index + 1
        return 0


def _is_queued(widget: Widget) -> bool:
    return isinstance(widget, Question) and widget.queued


def _is_pending(widget: Widget) -> bool:
    """Return whether notes are added above a widget: a queued question, or an answer without text yet."""
    return _is_queued(widget) or (isinstance(widget, Answer) and not (widget.finished or widget.text))


def live_count(answers: Sequence[Answer]) -> int:
    """Return how many of the last answers are never collapsed: as many as ``LIVE_WIDGETS`` allow, at least two."""
    widgets = 0
    for number, answer in enumerate(reversed(answers)):
        widgets += answer.weight
        if widgets > LIVE_WIDGETS and number >= 2:
            return number
    return len(answers)


class NewLines(Static):
    """The line under the transcript with the number of new lines below; a click scrolls there."""

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
    """The transcript with its gutter, and the line about new lines under it."""

    DEFAULT_CSS = "TranscriptPane { width: 1fr; layers: base above; }"

    def compose(self) -> ComposeResult:
        transcript = Transcript()
        yield transcript
        yield Gutter(transcript)
        yield NewLines(transcript)


class Chapter(Vertical):
    """Several messages; while ``folded`` a single plain text of about the same height.

    ``is_height_fixed`` is True from folding or unfolding until the receiver of ``Grew`` has scrolled along.
    """

    DEFAULT_CSS = """
    Chapter { height: auto; }
    Chapter > PlainText { padding: 0 2 0 3; color: $text-muted; }
    """

    @dataclass
    class Grew(Message):
        """``chapter`` becomes ``rows`` higher, which moves everything below it."""

        chapter: Chapter
        rows: int

    def __init__(self, messages: Sequence[Footed]) -> None:
        super().__init__()
        self.messages = list(messages)
        self.folded = True
        self.is_height_fixed = False

    def compose(self) -> ComposeResult:
        if self.folded:
            yield PlainText("\n\n".join(["", *(visible(folded(message.text)) for message, _ in self.messages)]))
        else:
            yield from (message_widget(message, footer) for message, footer in self.messages)

    def widgets(self) -> Iterator[Question | Answer]:
        """Yield the widgets of its messages; none while it is folded."""
        return (child for child in self.children if isinstance(child, Question | Answer))

    def has(self, id: str) -> bool:
        return any(message.id == id for message, _ in self.messages)

    def show_footer(self, id: str, footer: str) -> None:
        self.messages = [(message, footer if message.id == id else old) for message, old in self.messages]

    async def set_folded(self, folded: bool) -> bool:
        """Fold or unfold the chapter and return True; return False if it already is, or has no height yet.

        Its height stays fixed until the next layout, so that the transcript can scroll along.
        """
        if folded == self.folded or not self.size.height:
            return False
        self.styles.height, self.is_height_fixed = self.size.height, True
        self.folded = folded
        await self.recompose()
        self.call_after_refresh(self._release_height)
        return True

    def _release_height(self) -> None:
        if not self.is_attached:
            return
        rows = max((child.virtual_region.bottom for child in self.children), default=0)
        if not rows:  # no layout has placed them yet
            self.call_after_refresh(self._release_height)
            return
        self.post_message(self.Grew(self, rows - self.size.height))
        self.styles.height = "auto"


def message_widgets(messages: Sequence[Footed]) -> list[Widget]:
    """Return a widget for each of the newest messages, and chapters of the earlier ones if there are many."""
    rest = len(messages) - NEWEST if len(messages) > NEWEST + CHAPTER_LENGTH else 0
    chapters = [Chapter(messages[max(end - CHAPTER_LENGTH, 0) : end]) for end in range(rest, 0, -CHAPTER_LENGTH)]
    return [*reversed(chapters), *(message_widget(message, footer) for message, footer in messages[rest:])]


def shade(mark: Mark) -> str:
    """Return the glyph of a message, fuller the more of it is read."""
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
        # In a transcript that is not full yet messages move without a change of either.
        self.screen.screen_layout_refresh_signal.subscribe(self, lambda _: self._draw())

    def on_resize(self) -> None:
        """Draw at the new height without waiting for the next snapshot, which takes long during a prefill."""
        self._draw()

    def show(self, mark_of: MarkOf | None) -> None:
        """Show the marks that ``mark_of`` returns for the ids of the messages in view; None shows none."""
        self._mark_of = mark_of
        self._draw()

    def get_selection(self, selection: Selection) -> None:
        """Return nothing: a selection may begin here, but the marks do not belong to the text next to them."""

    def _draw(self) -> None:
        rows: list[Mark | None] = [None] * self.size.height
        top, mark_of = round(self._transcript.scroll_y), self._mark_of
        for message, region in self._transcript.message_regions() if mark_of else ():
            first, end = max(region.y - top, 0), min(region.bottom - top, len(rows))
            if first < end and mark_of and not message.has_class("queued"):
                rows[first:end] = [mark_of(message.message)] * (end - first)
        if rows != self._rows:
            self._rows = rows
            self.refresh()

    def render(self) -> Content:
        styled = [(shade(mark), f"$ribbon-{CLASSES.get(mark.letter, 'host')}") if mark else " " for mark in self._rows]
        return Content("\n").join(map(Content.assemble, styled))
