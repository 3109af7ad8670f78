"""The conversations kept: search them, open one, delete one."""

from __future__ import annotations

import re
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from kvchat.conversations.store import MARK, Summary
from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.tui.actions import bindings
from kvchat.tui.background import run_beside
from kvchat.tui.controller import ChatController
from kvchat.tui.screens.search import FoundList, SearchField, SearchScreen, css_of
from kvchat.tui.widgets.bars import KeyHints
from kvchat.units import count

FENCE = re.compile(r"(?m)^[ >]*(`{3,}|~{3,})[^\n`]*$|`{3,}|~{3,}")  # of code, also one that an excerpt cuts off


class ConversationField(SearchField):
    """Words of a conversation."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("conversations")


class TitleField(Input):
    """A new title, shown while it is written."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("title")


class ConversationsScreen(SearchScreen[Summary]):
    """Search in all messages for the text being typed; the list below shows the conversations found."""

    CSS = css_of("ConversationsScreen", width=100)

    def __init__(self, controller: ChatController, text: str) -> None:
        super().__init__()
        self._controller = controller
        self._text = text
        self._renamed = ""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "conversations"
            yield ConversationField(self._text, "Search in all messages…")
            yield FoundList()
            yield TitleField(placeholder="Another title…")
            yield KeyHints()

    async def on_mount(self) -> None:
        self.action_leave_title()
        await self._search(self._text)

    @on(Input.Changed, "ConversationField")
    def search(self, event: Input.Changed) -> None:
        """Search for what is typed; the search before is given up."""
        run_beside(self, partial(self._search, event.value), group="search", exclusive=True)

    async def action_choose(self) -> None:
        """Open the highlighted conversation."""
        if (chosen := await self._chosen()) is not None:
            await self._open(chosen)

    @on(OptionList.OptionSelected)
    async def open_selected(self, event: OptionList.OptionSelected) -> None:
        """Open a conversation, at the message found."""
        await self._open(self.shown[event.option.id or ""])

    async def action_rename(self) -> None:
        """Write another title for the highlighted conversation."""
        if (chosen := await self._chosen()) is not None:
            self._renamed = chosen.id
            title = self.query_one(TitleField)
            title.value, title.display = chosen.title, True
            self.set_focus(title)  # at once: the next key is for it

    @on(Input.Submitted, "TitleField")
    async def take_title(self, event: Input.Submitted) -> None:
        """Give the conversation the title written; none leaves it as it was."""
        self.action_leave_title()
        if event.value.strip():
            await self._try(self._controller.rename(event.value, self._renamed))
            if self._renamed in self.shown:
                options = self.query_one(OptionList)
                options.highlighted = options.get_option_index(self._renamed)

    def action_leave_title(self) -> None:
        """Go back to the search."""
        self.query_one(TitleField).display = False
        self.set_focus(self.query_one(ConversationField))

    async def action_delete(self) -> None:
        """Delete the highlighted conversation."""
        if (chosen := await self._chosen()) is not None:
            await self._try(self._controller.delete(chosen.id, visible(chosen.title)))

    async def action_restore(self) -> None:
        """Bring back the conversation deleted last."""
        await self._try(self._controller.restore())

    async def _chosen(self) -> Summary | None:
        """The highlighted conversation, once the search for all that was typed before is done."""
        text = self.query_one(ConversationField).value
        if text != self._text:
            await self._search(text)
        return self.highlighted

    async def _open(self, chosen: Summary) -> None:
        self.dismiss()
        try:
            await self._controller.open(chosen.id, chosen.message)
        except KvchatError as error:
            self.app.notify(str(error), severity="warning")

    async def _search(self, text: str) -> None:
        try:
            found = await self._controller.archive.search(text)
        except KvchatError as error:
            self.app.notify(str(error), severity="warning")
            return
        if not self.query(OptionList):
            return  # the screen was closed meanwhile
        self._text = text
        self.shown = {summary.id: summary for summary in found}
        options = self.query_one(OptionList)
        options.clear_options()
        now = time.time()
        options.add_options(Option(describe(summary, now), summary.id) for summary in found)
        if found:
            options.highlighted = 0
        shown = "nothing found" if text else "none yet: the first question begins one"
        self.query_one(Vertical).border_subtitle = f"{count(len(found))} found" if found else shown

    async def _try(self, change: Coroutine[Any, Any, None]) -> None:
        try:
            await change
        except KvchatError as error:
            self.app.notify(str(error), severity="warning")
        await self._search(self.query_one(ConversationField).value)


def describe(summary: Summary, now: float) -> Content:
    """Title, age and size; below it the words found."""
    age = describe_age(now - summary.updated)
    line = Content.assemble(
        visible(summary.title or "(no title)"), (f"   {age} · {count(summary.messages)} messages", "dim")
    )
    if not summary.excerpt:
        return line
    text = visible(" ".join(FENCE.sub(" ", summary.excerpt).split()))
    parts: list[Content | tuple[str, str]] = [line, ("\n  ", "")]
    for index, part in enumerate(text.replace(MARK[1], MARK[0]).split(MARK[0])):
        parts.append((part, "bold $accent" if index % 2 else "dim"))
    return Content.assemble(*parts)


def describe_age(age_s: float) -> str:
    """``125`` -> ``2 min ago``."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s // seconds:.0f} {unit} ago"
    return "just now"
