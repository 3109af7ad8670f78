"""Rows of numbers: complete, aligned, honest about what is missing."""

from __future__ import annotations

from dataclasses import replace

from support.app_driver import finished, texts, typed

from kvchat.config.modes import registered
from kvchat.protocol.figures import Gpu, Snapshot
from kvchat.tui.widgets.bars import StatusBar
from kvchat.tui.widgets.messages import Note
from kvchat.tui.widgets.panels import (
    WIDTH,
    KvColumn,
    Rowed,
    Rows,
    context_rows,
    extra_rows,
    gpu_rows,
    memory_rows,
    mode_rows,
    recall_rows,
)
from kvchat.tui.widgets.timeline import Timeline


def snapshot(**changes: object) -> Snapshot:
    given = {"mode": "full", "params": {}, "active": 0.0, "total": 0, "context": 0, "kv_device_bytes": 0}
    return Snapshot(**{**given, "kv_host_bytes": 0, **changes})


def as_dict(rows: Rows) -> dict[str, str]:
    return dict(rows)


def test_few_parameters_stand_alone_and_many_are_paired():
    assert mode_rows(snapshot()) == [("parameters", "none")]
    assert mode_rows(snapshot(params={"budget": None, "tau": 0.8})) == [("budget", "auto"), ("tau", "0.8")]


def test_many_parameters_share_lines_that_fit():
    assert mode_rows(snapshot(params={"a": 1, "b": True, "c": 3, "d": 4, "e": 5})) == [
        ("a · b · c · d", "1 · yes · 3 · 4"),
        ("e", "5"),
    ]
    for mode, cls in registered().items():
        params = cls().model_dump()
        rows = mode_rows(snapshot(mode=mode, params=params))
        assert sorted(" · ".join(label for label, _ in rows).split(" · ")) == (sorted(params) or ["parameters"])
        assert all(len(label) + 1 + len(value) <= WIDTH for label, value in rows)
        assert len(rows) <= 8


def test_what_is_read_and_what_was_computed_with_less():
    rows = as_dict(context_rows(snapshot(active=512.0, total=2048, context=16384, reduced_tokens=120)))
    assert rows["stored"] == "2,048 of 16,384"
    assert rows["read"] == "512 tok · 25 %"
    assert rows["reduced context"] == "120 tok"
    assert "reduced context" not in as_dict(context_rows(snapshot(total=1)))


def test_missing_readings_are_never_zero():
    assert as_dict(recall_rows(snapshot()))["hit rate"] == "n/a"
    assert as_dict(recall_rows(snapshot()))["p50 / p95"] == "n/a"
    memory = as_dict(memory_rows(snapshot()))
    assert memory["GPU"] == memory["torch"] == "n/a"
    allocated = as_dict(memory_rows(snapshot(torch_allocated=2**30, torch_reserved=2**31)))
    assert allocated["torch"] == "1.0 GiB of 2.0 GiB"
    assert as_dict(gpu_rows(Gpu("H200", used=2**30)))["load"] == "n/a · n/a · n/a"
    assert as_dict(gpu_rows(Gpu("H200")))["used"] == "n/a"


def test_extras_are_shown_as_they_come():
    assert extra_rows({"pages a step": 1.5, "note": "x"}) == [("pages a step", "1.5"), ("note", "x")]


async def test_the_next_modes_price_is_shown_before_f6(running):
    async with running() as (app, _pilot, until):
        typed(app, "hello there")
        await until(lambda: finished(app))
        rows = dict(app.chat.query_one("#mode-rows", Rowed).rows)
        assert rows["next → freeze"] == "3.0 MiB · 4 ms"
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
        assert recall["p50 / p95"] == "0.8 / 1.8 ms"
        assert recall["hit rate"] == "94 %"
        assert dict(app.chat.query_one("#extra-rows", Rowed).rows)["heads corrected"] == "3"
        status = app.chat.query_one(StatusBar).render().plain
        assert "tok/s" in status
        assert "VRAM 6.0 GiB/140 GiB" in status


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
        await until(lambda: own.size.height == 3)
        assert column.max_scroll_y == 0
        assert app.chat.query_one(Timeline).size.height >= 2
        await pilot.resize_terminal(80, 24)
        await pilot.press("f7")
        await until(lambda: column.display and own.region.height == 3 and own.region.bottom <= column.region.bottom)
        await pilot.resize_terminal(200, 60)
        await until(lambda: not own.display and app.chat.query_one("#extra-rows", Rowed).display)
