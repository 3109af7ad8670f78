"""Timers that come, on a busy machine too."""

from __future__ import annotations

import time

import pytest
from textual import _time

from kvchat.tui.widgets.base import Paced

STILL_S = 0.009  # longer than Textual waits for more changes of the size, 1/120 s


@pytest.fixture
def stands_still(monkeypatch):
    """A machine that does nothing else for a while whenever a timer asks what time it is."""
    lost = 0.0

    def later() -> float:
        nonlocal lost
        lost += STILL_S
        return time.monotonic() + lost

    monkeypatch.setattr(_time, "get_time", later)


async def test_a_terminal_that_has_become_large_enough_shows_the_chat(running, stands_still):
    async with running(size=(120, 40)) as (app, pilot, until):
        for size, is_too_small in (((30, 10), True), ((120, 40), False)):
            await pilot.resize_terminal(*size)
            await until(lambda is_too_small=is_too_small: app.chat.query_one("#too-small").display is is_too_small)


async def test_what_is_drawn_with_rests_is_drawn_again(running, stands_still):
    async with running() as (app, _pilot, until):
        drawn = []

        async def draw() -> None:
            drawn.append(len(drawn))

        paced = Paced(app.chat, draw)
        for number in range(3):
            paced.ask()
            await until(lambda number=number: len(drawn) == number + 1)
