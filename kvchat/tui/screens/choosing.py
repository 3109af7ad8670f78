"""Two screens with a list to choose from: the saved conversations, and the models on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from kvchat.conversations.store import MARK, Summary
from kvchat.foreign_text import visible
from kvchat.models import catalog
from kvchat.models.catalog import FoundModel, Room, fit, room
from kvchat.paths import is_server, of_hub
from kvchat.tui.actions import bindings
from kvchat.tui.controller import ChatController
from kvchat.tui.prompt.mentions import unquoted
from kvchat.tui.screens.base import FoundList, SearchField, SearchScreen, css_of, errors_as_toasts
from kvchat.tui.view import Find
from kvchat.tui.widgets.bars import KeyHints
from kvchat.tui.widgets.base import run_worker
from kvchat.units import count, size

FENCE = re.compile(r"(?m)^[ >]*(`{3,}|~{3,})[^\n`]*$|`{3,}|~{3,}")  # of code; an excerpt may cut its line off
PROBLEM_CELLS = 50
WIDTH, FRAME = 100, 6  # cells of the box of conversations, and of its frame
DOWNLOADED = "download"  # the kind of a model that is not on this machine yet


class ConversationField(SearchField):
    """Words to search for in all conversations."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("conversations")


class TitleField(Input):
    """A new title, shown during renaming."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("title")


class ConversationsScreen(SearchScreen[Summary]):
    """Lists the conversations with a message that contains the typed text."""

    CSS = css_of("ConversationsScreen", WIDTH)

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
            yield TitleField(placeholder="New title…")
            yield KeyHints()

    async def on_mount(self) -> None:
        self.action_leave_title()
        await self._search(self._text)

    @on(Input.Changed, "ConversationField")
    def search(self, event: Input.Changed) -> None:
        """Search for the typed text, and cancel the previous search."""
        run_worker(self, partial(self._search, event.value), group="search", exclusive=True)

    async def action_choose(self) -> None:
        if (chosen := await self._chosen()) is not None:
            await self._open(chosen)

    @on(OptionList.OptionSelected)
    async def open_selected(self, event: OptionList.OptionSelected) -> None:
        await self._open(self.shown[event.option.id or ""])

    async def action_rename(self) -> None:
        """Show the field for a new title of the highlighted conversation."""
        if (chosen := await self._chosen()) is not None:
            self._renamed = chosen.id
            title = self.query_one(TitleField)
            title.value, title.display = chosen.title, True
            self.set_focus(title)  # focus() would take effect only after the next key

    @on(Input.Submitted, "TitleField")
    async def submit_title(self, event: Input.Submitted) -> None:
        """Rename the conversation, unless the field is empty."""
        self.action_leave_title()
        if event.value.strip():
            await self._try(self._controller.rename(event.value, self._renamed))
            if self._renamed in self.shown:
                options = self.query_one(OptionList)
                options.highlighted = options.get_option_index(self._renamed)

    def action_leave_title(self) -> None:
        self.query_one(TitleField).display = False
        self.set_focus(self.query_one(ConversationField))

    async def action_delete(self) -> None:
        if (chosen := await self._chosen()) is not None:
            await self._try(self._controller.delete(chosen.id, visible(chosen.title)))

    async def action_restore(self) -> None:
        await self._try(self._controller.restore())

    async def _chosen(self) -> Summary | None:
        """Return the highlighted conversation, after a search for everything that has been typed."""
        text = self.query_one(ConversationField).value
        if text != self._text:
            await self._search(text)
        return self.highlighted

    async def _open(self, chosen: Summary) -> None:
        self.dismiss()
        with errors_as_toasts(self.app):
            await self._controller.open(chosen.id, chosen.message)

    async def _search(self, text: str) -> None:
        found: list[Summary] | None = None
        with errors_as_toasts(self.app):
            found = await self._controller.archive.search(text)
        if found is None or not self.query(OptionList):
            return  # the screen was closed meanwhile
        self._text = text
        self.shown = {summary.id: summary for summary in found}
        options = self.query_one(OptionList)
        options.clear_options()
        now, width = time.time(), min(self.app.size.width, WIDTH) - FRAME
        options.add_options(Option(describe_saved(summary, now, width), summary.id) for summary in found)
        if found:
            options.highlighted = 0
        empty = "nothing found" if text else "none yet: your first question starts one"
        self.query_one(Vertical).border_subtitle = f"{count(len(found))} found" if found else empty

    async def _try(self, change: Coroutine[Any, Any, None]) -> None:
        with errors_as_toasts(self.app):
            await change
        await self._search(self.query_one(ConversationField).value)


def describe_saved(summary: Summary, now: float, width: int) -> Content:
    """Return a line of ``width`` cells with title, age and number of messages; below it the excerpt found."""
    facts = Content.styled(f"   {describe_age(now - summary.updated)} · {count(summary.messages, 'message')}", "dim")
    title = Content(visible(summary.title or "(no title)"))
    line = title.truncate(max(width - facts.cell_length, 12), ellipsis=True) + facts
    if not summary.excerpt:
        return line
    text = visible(" ".join(FENCE.sub(" ", summary.excerpt).split()))
    parts: list[Content | tuple[str, str]] = [line, ("\n  ", "")]
    for index, part in enumerate(text.replace(MARK[1], MARK[0]).split(MARK[0])):
        parts.append((part, "bold $accent" if index % 2 else "dim"))
    return Content.assemble(*parts)


def describe_age(age_s: float) -> str:
    """Describe an age: ``125`` -> ``2 min ago``."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s // seconds:.0f} {unit} ago"
    return "just now"


class ModelField(SearchField):
    """A model's name or part of one, or a path."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("models")


class ModelsScreen(SearchScreen[FoundModel]):
    """Lists the models whose names contain the typed text, which may also be a path, a hub name or a server."""

    CSS = css_of("ModelsScreen", width=110)

    def __init__(self, controller: ChatController, find: Find) -> None:
        super().__init__()
        self._controller, self._find = controller, find
        self._models = controller.models
        self._found: list[FoundModel] | None = None
        self._room: Room | None = None
        self._text = ""
        self._is_chosen = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "models"
            box.border_subtitle = "looking…"
            yield ModelField(placeholder="Search, or type a path or a hub name such as Qwen/Qwen3-4B…")
            yield FoundList()
            yield Static(id="room", markup=False)
            yield KeyHints()

    def on_mount(self) -> None:
        run_worker(self, self._find_models)

    def action_choose(self) -> None:
        """Load the highlighted model; if the models have not been found yet, do so when they are."""
        self._is_chosen = self._found is None
        self._show_typed()
        if self.highlighted is not None:
            self._choose(self.highlighted)

    @on(OptionList.OptionSelected)
    def load_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(self.shown[event.option.id or ""])

    def action_plan(self) -> None:
        """Show in the transcript how much memory the highlighted model needs."""
        self._show_typed()
        if self.highlighted is not None:
            self.dismiss()
            with errors_as_toasts(self.app):
                self._models.plan(self.highlighted.name, None)

    def _choose(self, model: FoundModel) -> None:
        async def load() -> None:
            with errors_as_toasts(app):
                await self._models.choose(model.name, {})

        app = self.app
        self.dismiss()
        app.screen.call_later(load)  # not this one, which is closing; what is typed next comes after it

    async def _find_models(self) -> None:
        """Search for models in the background: folders may be large and disks slow."""
        load, snapshot = self._models.in_use, self._controller.state.snapshot
        released = snapshot.weight_bytes + snapshot.kv_device_bytes if snapshot else 0
        self._room, self._found = await asyncio.gather(asyncio.to_thread(room, load.device, released), self._find())
        if self.query(OptionList):
            self._show()
            if self._is_chosen:
                self.action_choose()

    @on(Input.Changed)
    def _show_typed(self) -> None:
        """Update the list: a key may be handled before the field reports that its text has changed."""
        if self._text != self.query_one(Input).value.strip():
            self._show()

    def _show(self) -> None:
        if self._found is None or self._room is None:
            return
        self._text = text = self.query_one(Input).value.strip()
        models = [model for model in self._found if text.lower() in model.name.lower()]
        models = [*models, *typed_model(text, models)]
        self.shown = {model.name: model for model in models}
        options = self.query_one(OptionList)
        options.clear_options()
        width = max(options.size.width - 3, 40)
        in_use, info = self._models.in_use, self._controller.state.info
        current = {in_use.model, f"{in_use.model.partition('#')[0]}#{info.model if info else ''}"}
        options.add_options(
            Option(describe_model(model, in_use.dtype, self._room, width, model.name in current), model.name)
            for model in models
        )
        options.highlighted = 0 if models else None
        self.query_one(Vertical).border_subtitle = f"{count(len(models))} found"
        where = "RAM" if self._room.device == "cpu" else "GPU memory"
        free = f"{size(self._room.free)} of {where} free, with the current model unloaded"
        self.query_one("#room", Static).update(free)


def typed_model(text: str, found: list[FoundModel]) -> list[FoundModel]:
    """Return the unlisted model that ``text`` names: a folder, a GGUF file, a server or a repository to download."""
    text = of_hub(unquoted(text))
    if not text or any(model.name == text and not model.problem for model in found):
        return []
    if is_server(text):
        return [FoundModel(text, "server", served="contacted when chosen")]
    if (local := catalog.at(Path(text))) is not None:
        return [local]
    return [FoundModel(text, DOWNLOADED)] if catalog.is_hub_name(text) else []


def describe_model(model: FoundModel, dtype: str, memory: Room, width: int, is_in_use: bool = False) -> Content:
    """Return name, kind, size on disk, type, and whether the model fits in ``memory``, in ``width`` cells."""
    home = os.path.expanduser("~")
    name = visible(model.name.replace(home, "~", 1) if model.name.startswith(f"{home}/") else model.name)
    facts = _facts(model, dtype, memory)
    longest = max(width - facts.cell_length - 3, 12)
    name = name if len(name) <= longest else f"…{name[1 - longest :]}"  # paths differ at their ends
    left = Content.assemble(("● " if is_in_use else "  ", "$primary"), name)
    return left.truncate(longest + 2, ellipsis=True, pad=True) + " " + facts


def _facts(model: FoundModel, dtype: str, memory: Room) -> Content:
    if model.kind == DOWNLOADED:
        return Content.assemble(("↓ will be downloaded", "$primary"))
    if model.served is not None:
        return Content.assemble((f"{visible(model.kind):<12} {visible(model.served)}", "dim"))
    if model.weights is None:
        return Content.assemble((f"✖ {visible(model.problem)}"[:PROBLEM_CELLS], "$error"))
    words = f"{visible(model.kind):<7} {size(model.weights.nbytes):>9}  {visible(model.weights.type):<9}"
    found = fit(model, dtype, memory)
    assert found is not None
    needed = size(found.needed)
    fits, style = f"~ {found.quantize} fits, {needed}", "$warning"
    if found.quantize in ("none", None):
        is_fitting = found.quantize == "none"
        fits, style = (f"✓ fits, takes {needed}", "$success") if is_fitting else (f"✖ too large, {needed}", "$error")
    return Content.assemble((words, "dim"), " ", (f"{fits:<23}", style))
