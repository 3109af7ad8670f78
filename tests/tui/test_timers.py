"""Timers that come, on a busy machine too."""

from __future__ import annotations

import gc
import time

import pytest
from textual import _time
from textual.notifications import Notification
from textual.widgets._toast import Toast

from kvchat.tui import app as app_module
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


# ---- Toasts that go, on a busy machine too


async def test_a_toast_that_is_made_while_its_time_runs_out_goes_and_stops_nothing(running, monkeypatch):
    async with running() as (app, _pilot, until):
        app.notify("read me")
        await until(lambda: len(app._notifications))
        (shown,) = app._notifications
        monkeypatch.setattr(Notification, "time_left", -0.001)
        assert shown.has_expired
        late = Toast(shown)
        assert late._timeout > 0  # else the next line never comes back
        await app.screen.mount(late)
        await until(lambda: not late.is_attached)


# ---- Full collections wait for a pause, but not for ever


@pytest.fixture
def collections(monkeypatch):
    """How often a full collection was asked for."""
    seen = []
    monkeypatch.setattr(gc, "collect", lambda: seen.append(1) or 0)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, app_module.WORTHWHILE))
    return seen


def test_garbage_is_collected_in_a_pause_only(collections):
    now, busy = [0.0], [True]
    collector = app_module.IdleCollector(lambda: busy[0], lambda: now[0])
    now[0] = 10.0
    collector.collect_if_idle()
    busy[0] = False
    now[0] += app_module.PAUSE_S / 2
    collector.collect_if_idle()
    assert not collections, "the answer ended just now"
    collector.note_use()
    now[0] += app_module.PAUSE_S / 2
    collector.collect_if_idle()
    assert not collections, "a key was pressed just now"
    now[0] += app_module.PAUSE_S
    collector.collect_if_idle()
    assert collections == [1]


def test_little_garbage_is_left(collections, monkeypatch):
    monkeypatch.setattr(gc, "get_count", lambda: (699, 9, app_module.WORTHWHILE - 1))
    collector = app_module.IdleCollector(lambda: False, iter([0.0, 100.0]).__next__)
    collector.collect_if_idle()
    assert not collections


def test_a_full_collection_comes_late_but_comes(monkeypatch):
    before = gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", lambda: None)
    try:
        app_module.postpone_full_collections()
        assert gc.get_threshold() == (*before[:2], app_module.LATE)
    finally:
        gc.set_threshold(*before)


async def test_keys_end_a_pause(running, monkeypatch):
    async with running() as (app, pilot, until):
        used = []
        monkeypatch.setattr(app._collector, "note_use", lambda: used.append(1))
        await pilot.press("a")
        await until(lambda: used)
