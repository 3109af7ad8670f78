"""The panel columns, filled and fitting."""

from __future__ import annotations

from dataclasses import replace

from support.app_driver import finished, press, texts, typed
from textual.widgets import Static

from kvchat.config.modes import registered
from kvchat.tui.widgets.bars import StatusBar
from kvchat.tui.widgets.messages import Note
from kvchat.tui.widgets.panels import EVENT_LENGTH, KvColumn, Rowed
from kvchat.tui.widgets.timeline import Timeline


async def test_the_next_modes_price_is_shown_before_f6(running):
    async with running() as (app, _pilot, until):
        typed(app, "hello there")
        await until(lambda: finished(app))
        rows = app.chat.query_one("#mode-rows", Rowed)
        await until(lambda: dict(rows.rows).get("to switch") == "moves 3.0 MiB · 4 ms")
        typed(app, "/mode")
        await until(lambda: any("(3.0 MiB · 4 ms)" in text for text in texts(app.chat.query(Note))))


async def test_panels_and_status_show_the_snapshot(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=(200, 60)) as (app, _pilot, until):
        typed(app, "/mode speculative")
        await until(lambda: app.controller.state.mode == "speculative")
        typed(app, "hello")
        await until(lambda: finished(app))
        memory = dict(app.chat.query_one("#memory-rows", Rowed).rows)
        assert memory["GPU"] == "NVIDIA H200"
        assert memory["this process"] == "n/a"
        assert memory["load"] == "45 % · 61 °C · n/a"
        assert memory["torch"] == "n/a"
        recall = dict(app.chat.query_one("#recall-rows", Rowed).rows)
        assert recall["time p50 / p95"] == "0.8 / 1.8 ms"
        assert recall["already there"] == "94 %"
        assert dict(app.chat.query_one("#extra-rows", Rowed).rows)["heads corrected"] == "3"
        status = app.chat.query_one(StatusBar).render().plain
        assert "tok/s" in status
        assert "VRAM 6.0 GiB/140 GiB" in status
        bar = app.chat.query_one(StatusBar)
        bar._speeds.clear()
        bar.snapshot = replace(app.controller.state.snapshot, tokens_per_s=None)
        assert bar.render().plain.startswith(" reads ")


async def test_the_modes_own_numbers_are_shown_once_and_everything_fits(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=(120, 40)) as (app, pilot, until):
        typed(app, "/mode speculative")
        await until(lambda: app.controller.state.mode == "speculative")
        typed(app, "hello")
        await until(lambda: finished(app))
        column, own = app.chat.query_one(KvColumn), app.chat.query_one("#own-rows", Rowed)
        snapshot = replace(
            app.controller.state.snapshot,
            mode="freeze",
            params=registered()["freeze"]().model_dump(),
            reduced_tokens=120,
            corrections=0,
            extras={"frozen now": 557, "mean timer": 1.4, "thaws a step": 12.5, "recovery": "calm"},
        )
        column.show(snapshot)
        assert dict(own.rows) == {"frozen now": "557", "mean timer": "1.4", "thaws a step": "12.5"}
        await until(lambda: own.size.height == 3 and app.chat.query_one(Timeline).size.height >= 2)
        await until(lambda: column.size.height and column.max_scroll_y == 0)
        await pilot.resize_terminal(80, 24)
        await until(lambda: not column.display)
        press(app, "f7")
        await until(lambda: column.display and own.region.height == 3 and own.region.bottom <= column.region.bottom)
        await pilot.resize_terminal(200, 60)
        await until(lambda: not own.display and app.chat.query_one("#extra-rows", Rowed).display)


async def test_an_event_of_any_length_is_a_line_of_the_log(running):
    async with running(size=(200, 60)) as (app, _pilot, until):
        log = app.chat.query_one("#events", Static)
        app.chat.log_event("x" * 10**6)
        app.chat.log_event("the next")
        await until(lambda: "the next" in str(log.content))
        assert len(str(log.content)) < EVENT_LENGTH + 1000
