"""Timers fire on a busy machine too, and redraws are paced."""

import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from textual import _time
from textual._callback import invoke

from kvchat.tui.widgets import base
from kvchat.tui.widgets.base import LONGEST_S, SHORTEST_S, Paced, interval

STALL_S = 0.009  # longer than Textual waits for further resizes, 1/120 s


@pytest.fixture
def stalling_clock(monkeypatch):
    """A machine that stalls for a while whenever a timer asks for the time."""
    lost = 0.0

    def later():
        nonlocal lost
        lost += STALL_S
        return time.monotonic() + lost

    monkeypatch.setattr(_time, "get_time", later)


async def test_enlarging_the_terminal_shows_the_chat_again(running, stalling_clock):
    async with running(size=(120, 40)) as (app, pilot, until):
        for size, is_too_small in (((30, 10), True), ((120, 40), False)):
            await pilot.resize_terminal(*size)
            await until(lambda is_too_small=is_too_small: app.chat.query_one("#too-small").display is is_too_small)


async def test_paced_drawing_repeats(running, stalling_clock):
    async with running() as (app, _pilot, until):
        drawn = []

        async def draw():
            drawn.append(len(drawn))

        paced = Paced(app.chat, draw)
        for number in range(3):
            paced.request()
            await until(lambda number=number: len(drawn) == number + 1)


# ---- Requests that come faster than drawing are merged, with pauses between


@pytest.mark.parametrize(("cost", "seconds"), [(0.001, 0.05), (0.02, 0.08), (0.05, 0.2), (3.0, 0.4)])
def test_the_interval_is_four_times_the_cost_within_bounds(cost, seconds):
    assert interval(cost) == pytest.approx(seconds)


class FakePump:
    """A manual clock, its timers, and a layout that takes ``layout_s``."""

    def __init__(self, layout_s: float) -> None:
        self.now, self.computed, self.layout_s = 0.0, 0.0, layout_s
        self.timers: list[tuple[float, Callable[[], Any]]] = []

    def set_timer(self, seconds: float, callback: Callable[[], Any]) -> SimpleNamespace:
        self.timers.append((self.now + seconds, callback))
        return SimpleNamespace()

    async def next_timer(self) -> None:
        at, call = self.timers.pop(0)
        self.now = max(self.now, at)
        await invoke(call)

    async def until_drawn(self, drawn: list[float]) -> None:
        before = len(drawn)
        while len(drawn) == before:
            await self.next_timer()


@pytest.fixture
def run(monkeypatch):
    def build(layout_s):
        pump: Any = FakePump(layout_s)
        monkeypatch.setattr(base, "thread_time", lambda: pump.computed)
        drawn: list[float] = []

        async def draw():
            drawn.append(pump.now)
            pump.computed += pump.layout_s

        return pump, Paced(pump, draw), drawn

    return build


async def test_simultaneous_requests_are_drawn_once(run):
    pump, paced, drawn = run(0.0)
    for _ in range(5):
        paced.request()
    assert not drawn
    await pump.until_drawn(drawn)
    assert drawn == [SHORTEST_S]
    while pump.timers:
        await pump.next_timer()
    assert len(drawn) == 1  # nothing was requested since
    paced.request()
    await pump.until_drawn(drawn)
    assert len(drawn) == 2


@pytest.mark.parametrize(("layout_s", "pause"), [(0.0, SHORTEST_S), (0.06, 0.24), (1.0, LONGEST_S)])
async def test_the_pause_follows_the_layout_cost(run, layout_s, pause):
    pump, paced, drawn = run(layout_s)
    for _ in range(3):
        paced.request()
        await pump.until_drawn(drawn)
    assert [after - before for before, after in pairwise(drawn)] == [pytest.approx(pause, abs=0.002)] * 2
