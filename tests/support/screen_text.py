"""The characters of a screen, and their comparison with a text that was committed.

``pytest --update-snapshots`` writes the texts anew; ``git diff`` then shows what has changed on the screens.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from pathlib import Path

from support.patience import PATIENCE_S
from textual.app import App
from textual.geometry import Region
from textual.screen import ModalScreen

SETTLED_S = 5.0  # a screen that has been the same for so long is taken for right


def screen_text(app: App[None]) -> str:
    """The rows of the screen, or of the box in front of it: how much shines through beside that is another matter."""
    region = app.size.region
    if isinstance(app.screen, ModalScreen):
        region = app.screen.children[0].region if app.screen.children else Region()
    strips = app.screen._compositor.render_strips()[region.y : region.bottom]
    return "".join(f"{strip.crop(region.x, region.right).text.rstrip()}\n" for strip in strips)


async def difference(app: App[None], expected: Path, update: bool, patience_s: float = PATIENCE_S) -> str:
    """Wait until the screen is as the file says; else how it differs when patience ends.

    With ``update`` the settled screen is written to the file.
    """
    wanted = expected.read_text("utf-8") if expected.exists() and not update else None
    shown, deadline = screen_text(app), time.monotonic() + (SETTLED_S if update else patience_s)
    while shown != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        before, shown = shown, screen_text(app)
        if update and shown != before:
            deadline = time.monotonic() + SETTLED_S
    if update:
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(shown, "utf-8")
    elif shown != wanted:
        lines = difflib.unified_diff((wanted or "").split("\n"), shown.split("\n"), expected.name, "shown", lineterm="")
        return "\n".join(lines)
    return ""
