"""A long plain text as a widget for every few lines, so that no change lays out all of it."""

from __future__ import annotations

import asyncio

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from kvchat.tui.answering.large_answers import slices

MOUNTED_AT_ONCE = 4


class Slices(Vertical):
    """Plain text, which grows at its end."""

    DEFAULT_CSS = "Slices { height: auto; } Slices > Static { height: auto; }"

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._parts = slices(text) if text else []

    def compose(self) -> ComposeResult:
        yield from (Static(part, markup=False) for part in self._parts)

    async def show(self, text: str) -> None:
        """Show another text; only parts that differ are drawn, and few new ones at a time."""
        parts = slices(text) if text else []
        known = list(self.query_children(Static))
        for widget, old, new in zip(known, self._parts, parts, strict=False):
            if old != new:
                widget.update(new)
        self._parts = parts
        if len(known) > len(parts):
            await self.remove_children(known[len(parts) :])
        for start in range(len(known), len(parts), MOUNTED_AT_ONCE):
            await self.mount_all(Static(part, markup=False) for part in parts[start : start + MOUNTED_AT_ONCE])
            await asyncio.sleep(0)
