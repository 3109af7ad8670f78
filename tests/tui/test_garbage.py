"""Full collections wait for a pause, but not for ever."""

from __future__ import annotations

import gc

import pytest

from kvchat.tui import app as app_module


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
