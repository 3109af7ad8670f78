"""What comes faster than it is drawn is drawn together, with rests between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from textual._callback import invoke

from kvchat.tui.widgets import base
from kvchat.tui.widgets.base import LONGEST_S, SHORTEST_S, Paced, interval


@pytest.mark.parametrize(("cost", "seconds"), [(0.001, 0.05), (0.02, 0.08), (0.05, 0.2), (3.0, 0.4)])
def test_the_interval_is_four_times_the_cost_within_bounds(cost, seconds):
    assert interval(cost) == pytest.approx(seconds)


class FakePump:
    """A clock that moves only when told, its timers, and a layout that computes for ``layout_s``."""

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
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    def made(layout_s: float) -> tuple[FakePump, Paced, list[float]]:
        pump: Any = FakePump(layout_s)
        monkeypatch.setattr(base, "thread_time", lambda: pump.computed)
        drawn: list[float] = []

        async def draw() -> None:
            drawn.append(pump.now)
            pump.computed += pump.layout_s

        return pump, Paced(pump, draw), drawn

    return made


async def test_what_is_asked_for_at_once_is_drawn_once(run):
    pump, paced, drawn = run(0.0)
    for _ in range(5):
        paced.ask()
    assert not drawn
    await pump.until_drawn(drawn)
    assert drawn == [SHORTEST_S]
    while pump.timers:
        await pump.next_timer()
    assert len(drawn) == 1  # nothing was asked for since
    paced.ask()
    await pump.until_drawn(drawn)
    assert len(drawn) == 2


@pytest.mark.parametrize(("layout_s", "rest"), [(0.0, SHORTEST_S), (0.06, 0.24), (1.0, LONGEST_S)])
async def test_the_rest_is_as_long_as_the_layout_wants_it(run, layout_s, rest):
    pump, paced, drawn = run(layout_s)
    for _ in range(3):
        paced.ask()
        await pump.until_drawn(drawn)
    assert [after - before for before, after in pairwise(drawn)] == [pytest.approx(rest, abs=0.002)] * 2
