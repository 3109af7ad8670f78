"""What the scripts that play a scene in the application share."""

from __future__ import annotations

from collections.abc import Callable

from textual.pilot import Pilot

from kvchat.tui.app import KvchatApp


async def answered(app: KvchatApp, pilot: Pilot[None], text: str) -> None:
    """Ask and wait for the end of the answer."""
    await app.controller.ask(text)
    await until(pilot, lambda: app.controller.state.phase.busy)
    await until(pilot, lambda: not app.controller.state.phase.busy)


def stored(app: KvchatApp) -> int:
    """Tokens stored."""
    snapshot = app.controller.state.snapshot
    return snapshot.total if snapshot else 0


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():
        await pilot.pause(0.02)
