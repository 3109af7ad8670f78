"""Keys act one after the other, each where those before it have led."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from textual.app import App
from textual.dom import DOMNode
from textual.events import Event, Key
from textual.message_pump import MessagePump

LONGEST_S = 5.0  # what a key began may take longer: the next ones do not wait for the end of it


class KeysInTurn:
    """Has ``pass_on`` give the application one key or paste after the other.

    Textual lets a widget insert a letter at once, while a key that is bound goes through all its parents first. What a
    slow line delivers together would act in another order: ``teh``, Backspace twice and ``he`` would be ``teh`` again,
    and what follows Esc would go to the screen that is just closing.
    """

    def __init__(self, app: App[None], pass_on: Callable[[Event], Awaitable[None]]) -> None:
        self._app, self._pass_on = app, pass_on
        self._waiting: deque[Event] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, event: Event) -> None:
        """Pass it on when all before it have acted."""
        self._waiting.append(event)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._act(), LONGEST_S)

    async def _act(self) -> None:
        """Pass on the next key and wait until the widgets on its way are done with it and what they sent each other."""
        passed: list[tuple[Event, DOMNode]] = []
        await _done(self._app, partial(self._forward, passed))
        if not passed:
            self._waiting.clear()  # the application closes
        elif not _is_taken(*passed[-1]):
            await self._handled(passed[-1][1])

    async def _handled(self, target: DOMNode) -> None:
        way = target.ancestors_with_self
        for node in (
            *way,
            *way,
        ):  # also where it is stopped: Textual stops it as well where the application's turn begins
            await _done(node)
        await _done(self._app.screen)  # it may have been opened just now

    async def _forward(self, passed: list[tuple[Event, DOMNode]]) -> None:
        """Letters together, and the key behind them: a line takes them in turn, and is drawn once."""
        while self._waiting and (not passed or _is_taken(*passed[-1])):
            event = self._waiting.popleft()
            _focus(self._app)
            passed.append((event, self._app.focused or self._app.screen))
            await self._pass_on(event)


def _focus(app: App[None]) -> None:
    """Focus what the screen focuses when it opens, if nothing is.

    Textual does not while the terminal lies behind others, and takes the focus away at a click beyond the edge of a
    terminal that has just become smaller.
    """
    app.app_focus = True
    app.screen._update_auto_focus()


def _is_taken(event: Event, target: DOMNode) -> bool:
    """True if it is a letter for a line: the next event acts after it."""
    return isinstance(event, Key) and target.check_consume_key(event.key, event.character)


async def _done(pump: MessagePump, work: Callable[[], Awaitable[None]] | None = None) -> None:
    """Wait until ``pump`` has handled what it was sent so far, and ``work`` after it."""
    done = asyncio.Event()

    async def finish() -> None:
        try:
            if work is not None:
                await work()
        finally:
            done.set()

    if pump.call_later(finish):  # not while it closes
        await done.wait()
