"""Driving the application in tests: what is on its screen, and lines typed into its prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from textual import events
from textual.app import App
from textual.widgets import Static

from kvchat.tui.app import KvchatApp
from kvchat.tui.state import Phase
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.messages import Note
from kvchat.tui.widgets.prompt import Prompt
from kvchat.tui.widgets.transcript import Transcript

TIMEOUT_S = 60.0  # for busy machines; a condition that comes true is not waited for


def texts(widgets: Iterable[Static]) -> list[str]:
    return [str(widget.content) for widget in widgets]


def notes(app: KvchatApp) -> list[str]:
    return texts(app.chat.query(Note))


def toasts(app: KvchatApp) -> str:
    """All that is told in passing and still on the screen."""
    return "\n".join(notice.message for notice in app._notifications)


def prompt(app: KvchatApp) -> Prompt:
    return app.chat.query_one(Prompt)


def answers(app: KvchatApp) -> list[Answer]:
    return app.chat.query_one(Transcript).answers()


def finished(app: KvchatApp, count: int = 1) -> bool:
    """Whether so many answers are complete and the engine is ready."""
    state = app.controller.state
    return len(state.conversation.stats) == count and state.phase is Phase.READY and answers(app)[-1].finished


def press(app: App[None], *keys: str) -> None:
    """Press keys without waiting: the pilot waits for every widget, in vain for one that a stream replaces."""
    for key in keys:
        app.post_message(events.Key(key, None))


def typed(app: KvchatApp, text: str) -> None:
    """Put a line into the prompt and press Enter."""
    prompt(app).insert(text)
    press(app, "enter")


async def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)
