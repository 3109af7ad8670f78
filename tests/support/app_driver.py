"""Drives the application in tests: reads its screen and types into its prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from support.patience import PATIENCE_S
from textual import events
from textual.app import App
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import OptionList, Static

from kvchat.tui.app import KvchatApp
from kvchat.tui.state import Phase
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.composer import Prompt
from kvchat.tui.widgets.messages import Note
from kvchat.tui.widgets.transcript import Transcript

CHARACTERS = {"space": " ", "slash": "/", "at": "@", "full_stop": "."}


def texts(widgets: Iterable[Static]) -> list[str]:
    return [str(widget.content) for widget in widgets]


def notes(app: KvchatApp) -> list[str]:
    return texts(app.chat.query(Note))


def toasts(app: KvchatApp) -> str:
    """The texts of all toasts, one a line."""
    return "\n".join(notice.message for notice in app._notifications)


def prompt(app: KvchatApp) -> Prompt:
    return app.chat.query_one(Prompt)


def answers(app: KvchatApp) -> list[Answer]:
    return [message for message, _ in app.chat.query_one(Transcript).message_regions() if isinstance(message, Answer)]


def choices(app: KvchatApp) -> list[str]:
    """The lines of the list on the screen."""
    listed = app.screen.query_one(OptionList)
    return [str(listed.get_option_at_index(index).prompt) for index in range(listed.option_count)]


def receipts(app: KvchatApp) -> list[str]:
    return [answer.receipt for answer in answers(app)]


def is_finished(app: KvchatApp, count: int = 1) -> bool:
    """Whether ``count`` answers have stats, the last one is finished and the engine is ready."""
    state = app.controller.state
    is_ready = len(state.conversation.stats) == count and state.phase is Phase.READY
    return is_ready and [answer.finished for answer in answers(app)][-1:] == [True]


def is_open(app: App[None], kind: type[Screen[Any]]) -> bool:
    """Whether a screen of this kind is on top and one of its widgets has the focus."""
    return isinstance(app.screen, kind) and app.screen.focused is not None


def drawn(app: App[None]) -> str:
    """The text on the screen, without colors."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def press(app: App[None], *keys: str) -> None:
    """Press keys without waiting: the pilot waits too briefly, or forever while much happens at once."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else CHARACTERS.get(key)))


def submit(app: KvchatApp, text: str) -> None:
    """Replace the text of the prompt, which may be a refused command, by a line and press Enter."""
    prompt(app).clear()
    prompt(app).insert(text)
    press(app, "enter")


async def ask(app: KvchatApp, *questions: str, mode: str = "") -> None:
    """Enter the mode if one is named, then send each question and wait for its answer."""
    if mode:
        submit(app, f"/mode {mode}")
        await wait_for(lambda: app.controller.state.mode == mode)
    for question in questions:
        count = len(app.controller.state.conversation.stats) + 1
        submit(app, question)
        await wait_for(lambda count=count: is_finished(app, count))


async def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


async def focus(widget: Widget) -> None:
    """Focus a widget, and wait until it has the focus."""
    widget.focus()
    await wait_for(lambda: widget.has_focus)
