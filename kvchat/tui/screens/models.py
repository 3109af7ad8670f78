"""The models on this machine: choose one, or type the name of another."""

from __future__ import annotations

import asyncio
import os
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

from kvchat.errors import KvchatError
from kvchat.foreign_text import visible
from kvchat.models import catalog
from kvchat.models.catalog import FoundModel, Room, fit, room
from kvchat.tui.actions import bindings
from kvchat.tui.background import run_beside
from kvchat.tui.controller import ChatController
from kvchat.tui.screens.search import FoundList, SearchField, SearchScreen, css_of
from kvchat.tui.widgets.bars import KeyHints
from kvchat.units import count, size

PROBLEM_CELLS = 50
DOWNLOADED = "download"  # the kind of a model that is not on this machine


class ModelField(SearchField):
    """A name, part of one, or a path."""

    BINDINGS: ClassVar[list[BindingType]] = bindings("models")


class ModelsScreen(SearchScreen[FoundModel]):
    """Search in the names of models for the text being typed; it may also be a path or a name on the hub."""

    CSS = css_of("ModelsScreen", width=110)

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._models = controller.models
        self._found: list[FoundModel] | None = None
        self._room: Room | None = None
        self._text = ""
        self._is_chosen = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "models"
            box.border_subtitle = "looking…"
            yield ModelField(placeholder="Type to search, or a path, or a name on the hub such as Qwen/Qwen3-4B…")
            yield FoundList()
            yield Static(id="room", markup=False)
            yield KeyHints()

    def on_mount(self) -> None:
        run_beside(self, self._look)

    @on(Input.Changed)
    def search(self) -> None:
        """Show the models whose names say what is typed."""
        self._show_typed()

    def action_choose(self) -> None:
        """Load the highlighted model, once the models are found."""
        self._is_chosen = self._found is None
        self._show_typed()
        if self.highlighted is not None:
            self._choose(self.highlighted)

    @on(OptionList.OptionSelected)
    def load_selected(self, event: OptionList.OptionSelected) -> None:
        """Load a model."""
        self._choose(self.shown[event.option.id or ""])

    def action_plan(self) -> None:
        """Show what the highlighted model will take, in the transcript."""
        self._show_typed()
        if self.highlighted is not None:
            self.dismiss()
            try:
                self._models.plan(self.highlighted.name, None)
            except KvchatError as error:
                self.app.notify(str(error), severity="warning")

    def _choose(self, model: FoundModel) -> None:
        self.dismiss()
        run_beside(self.app, partial(self._load, model.name))  # this screen's own work ends with it

    async def _load(self, name: str) -> None:
        try:
            await self._models.choose(name, {})
        except KvchatError as error:
            self.app.notify(str(error), severity="warning")

    async def _look(self) -> None:
        """Look for models beside the screen's work: folders may be large and disks slow."""
        load, snapshot = self._models.in_use, self._controller.state.snapshot
        released = snapshot.weight_bytes + snapshot.kv_device_bytes if snapshot else 0
        self._room, self._found = await asyncio.gather(
            asyncio.to_thread(room, load.device, released), asyncio.to_thread(catalog.find, self._models.folders)
        )
        if self.query(OptionList):
            self._show()
            if self._is_chosen:
                self.action_choose()

    def _show_typed(self) -> None:
        """Show what is typed, unless the list shows it: keys may come before the field tells of a change."""
        if self._text != self.query_one(Input).value.strip():
            self._show()

    def _show(self) -> None:
        if self._found is None or self._room is None:
            return
        self._text = text = self.query_one(Input).value.strip()
        models = [model for model in self._found if text.lower() in model.name.lower()]
        models = [*models, *typed(text, models)]
        self.shown = {model.name: model for model in models}
        options = self.query_one(OptionList)
        options.clear_options()
        width = max(options.size.width - 3, 40)
        in_use = self._models.in_use
        options.add_options(
            Option(describe(model, in_use.dtype, self._room, width, model.name == in_use.model), model.name)
            for model in models
        )
        options.highlighted = 0 if models else None
        self.query_one(Vertical).border_subtitle = f"{count(len(models))} found"
        where = "of this machine's memory" if self._room.device == "cpu" else "on the GPU"
        free = f"{size(self._room.free)} {where} are free, with what the model in use takes"
        self.query_one("#room", Static).update(free)


def typed(text: str, found: list[FoundModel]) -> list[FoundModel]:
    """The model that ``text`` names by itself: a folder, a GGUF file, or a repository of the hub to be downloaded."""
    if not text or any(model.name == text and not model.problem for model in found):
        return []
    if (there := catalog.at(Path(text))) is not None:
        return [there]
    return [FoundModel(text, DOWNLOADED)] if catalog.is_hub_name(text) else []


def describe(model: FoundModel, dtype: str, there: Room, width: int, is_in_use: bool = False) -> Content:
    """Name, kind, size on disk, type, and whether it fits, in ``width`` cells."""
    home = os.path.expanduser("~")
    name = visible(model.name.replace(home, "~", 1) if model.name.startswith(f"{home}/") else model.name)
    facts = _facts(model, dtype, there)
    longest = max(width - facts.cell_length - 3, 12)
    name = name if len(name) <= longest else f"…{name[1 - longest :]}"  # paths differ at their ends
    left = Content.assemble(("● " if is_in_use else "  ", "$primary"), name)
    return left.truncate(longest + 2, ellipsis=True, pad=True) + " " + facts


def _facts(model: FoundModel, dtype: str, there: Room) -> Content:
    if model.kind == DOWNLOADED:
        return Content.assemble(("↓ not here yet, to be downloaded", "$primary"))
    if model.weights is None:
        return Content.assemble((f"✖ {visible(model.problem)}"[:PROBLEM_CELLS], "$error"))
    kind = model.quantization or model.weights.dtype
    words = f"{visible(model.kind):<7} {size(model.weights.nbytes):>9}  {visible(kind):<9}"
    return Content.assemble((words, "dim"), " ", _fit(model, dtype, there))


def _fit(model: FoundModel, dtype: str, there: Room) -> tuple[str, Any]:
    found = fit(model, dtype, there)
    assert found is not None
    needed = size(found.needed)
    if found.quantize == "none":
        return f"✓ fits, takes {needed:<9}", "$success"
    if found.quantize:
        return f"~ {found.quantize} fits, {needed:<8}", "$warning"
    return f"✖ too large, {needed:<8}", "$error"
