"""The columns of panels, badges and the event log."""

from dataclasses import replace

import pytest
from support.app_driver import ask, press, prompt, submit, texts
from textual.widgets import Static

from kvchat.config.modes import registered
from kvchat.tui.widgets.bars import BADGE_GLYPH, BADGE_STYLE, STATUS, Badges, KeyHints, StatusBar, short_badges
from kvchat.tui.widgets.messages import Note
from kvchat.tui.widgets.panels import EVENT_LENGTH, KvColumn, LabeledRows, Timeline

ALL = "figures-all"


async def test_four_figures_are_shown_until_f7_shows_all(running):
    async with running() as (app, pilot, until):
        column, plain = app.chat.query_one(KvColumn), app.chat.query_one("#plain-rows", LabeledRows)

        def shown():
            return [row for block in app.chat.query(LabeledRows) if block.size for row in block.rows]

        await until(lambda: len(shown()) == 4 and plain.rows[0] == ("reads", "nothing yet"))
        await ask(app, "hello there")
        total = app.controller.state.snapshot.total
        await until(lambda: dict(plain.rows)["reads"] == f"{total} of {total} · 100 %")
        column.focus()
        await until(lambda: str(column.query_one("#meaning", Static).content).startswith("reads: "))
        press(app, "f7")
        await until(lambda: len(shown()) > 8 and not plain.size)
        mode, rows = app.chat.query_one("#mode-rows", LabeledRows), app.chat.query_one("#context-rows", LabeledRows)
        await until(lambda: dict(mode.rows).get("to switch") == "moves 3.0 MiB · 4 ms")
        await pilot.hover(rows, offset=(3, 1))
        await until(lambda: str(rows.tooltip).startswith("reads: stored tokens"))
        await pilot.hover(rows, offset=(3, 0))
        await until(lambda: rows.tooltip is None)
        press(app, "f7")
        await until(lambda: not column.display)
        press(app, "f7")
        await until(lambda: column.display and len(shown()) == 4)
        submit(app, "/mode")
        await until(lambda: any("(3.0 MiB · 4 ms)" in text for text in texts(app.chat.query(Note))))


async def test_panels_and_status_show_snapshot_and_mode_figures(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=(200, 60)) as (app, pilot, until):
        app.chat.add_class(ALL)
        await ask(app, "hello", mode="speculative")
        memory = dict(app.chat.query_one("#memory-rows", LabeledRows).rows)
        assert memory["GPU"] == "NVIDIA H200"
        assert memory["load"] == "45 % · 61 °C"
        assert not memory.keys() & {"this process", "torch"}
        recall = dict(app.chat.query_one("#recall-rows", LabeledRows).rows)
        assert recall["time p50 / p95"] == "0.8 / 1.8 ms"
        assert recall["hit rate"] == "94 %"
        assert dict(app.chat.query_one("#extra-rows", LabeledRows).rows)["heads corrected"] == "3"
        status = app.chat.query_one(StatusBar).render().plain
        assert "tok/s" in status
        assert "VRAM 6.0 GiB/140 GiB" in status
        assert [word for word in STATUS if word not in status] == []
        bar = app.chat.query_one(StatusBar)
        bar._speeds.clear()
        bar._speed = None
        bar.snapshot = replace(app.controller.state.snapshot, tokens_per_s=None)
        assert bar.render().plain.startswith(" reads ")
        await pilot.resize_terminal(120, 40)
        column, own = app.chat.query_one(KvColumn), app.chat.query_one("#own-rows", LabeledRows)
        await until(lambda: own.display)
        params = registered()["freeze"]().model_dump()
        extras = {"frozen now": 557, "mean timer": 1.4, "thaws a step": 12.5, "recovery": "calm"}
        shown = app.controller.state.snapshot
        column.show(replace(shown, mode="freeze", params=params, reduced_tokens=120, corrections=0, extras=extras))
        assert dict(own.rows) == {"frozen now": "557", "mean timer": "1.4", "thaws a step": "12.5"}
        await until(lambda: own.size.height == 3 and app.chat.query_one(Timeline).size.height >= 2)
        await until(lambda: column.size.height and column.max_scroll_y == 0)
        await pilot.resize_terminal(80, 24)
        await until(lambda: not column.display)
        press(app, "f7", "f7")
        await until(lambda: column.display and own.region.height == 3 and own.region.bottom <= column.region.bottom)


@pytest.mark.parametrize("size", [(120, 40), (200, 60)])
async def test_a_focused_panel_explains_the_selected_row(running, monkeypatch, size):
    monkeypatch.setenv("FAKE_GPU", "1")
    async with running(size=size) as (app, _pilot, until):
        app.chat.add_class(ALL)
        await ask(app, "hello", mode="speculative")
        column = app.chat.query_one(KvColumn)
        meaning = column.query_one("#meaning", Static)
        assert not meaning.display
        column.focus()
        await until(lambda: meaning.display and str(meaning.content).startswith("reads: stored tokens that"))
        assert "↑/↓ what a figure means" in app.chat.query_one(KeyHints).render().plain
        figures = registered()["speculative"].figures
        for _ in range(40):
            press(app, "down")
        await until(lambda: str(meaning.content).startswith(LAST[size]))
        assert meaning.region.bottom <= app.size.height
        explanations = [str(meaning.content)]
        while not explanations[-1].startswith("reads: "):
            press(app, "up")
            await until(lambda: str(meaning.content) != explanations[-1])
            explanations.append(str(meaning.content))
        assert f"heads corrected: {figures['heads corrected']}" in explanations
        press(app, "escape")
        await until(lambda: prompt(app).has_focus and not meaning.display)
        assert {block.chosen for block in app.chat.query(LabeledRows)} == {None}


LAST = {(120, 40): "K/V in RAM: ", (200, 60): "heads corrected: "}


# ---- Badges: glyph and words in the status bar, reasons in the panels


PAGEABLE = "pageable host memory: cudaHostRegister: out of memory (2)"
EAGER = "no CUDA graph: RuntimeError: operation not permitted when stream is capturing"


def test_badges_are_counted_if_room_is_short():
    assert short_badges((), 80).plain == ""
    both = short_badges((PAGEABLE, EAGER), 60)
    assert both.plain == f" {BADGE_GLYPH} pageable host memory · no CUDA graph "
    assert short_badges((PAGEABLE, EAGER), len(both)).plain == both.plain
    assert short_badges((PAGEABLE, EAGER), len(both) - 1).plain == f" {BADGE_GLYPH} 2 "
    assert [span.style for span in both.spans] == [BADGE_STYLE]


async def test_badges_show_reasons_and_fit_every_width(running, monkeypatch):
    monkeypatch.setenv("FAKE_BADGES", f"{PAGEABLE}|{EAGER}")
    async with running(size=(120, 40)) as (app, pilot, until):
        bar, badges = app.chat.query_one(StatusBar), app.chat.query_one(Badges)

        def shown():
            return " ".join("".join(strip.text for strip in badges.render_lines(badges.size.region)).split())

        await until(
            lambda: badges.size.height > 2 and "out of memory (2)" in shown() and shown().count(BADGE_GLYPH) == 2
        )
        submit(app, "slow")
        for width, words in ((80, "memory · no CUDA graph"), (40, f"{BADGE_GLYPH} 2")):
            await pilot.resize_terminal(width, 24)
            await until(lambda width=width: "tok/s" in bar.render().plain and bar.size.width == width)
            assert words in bar.render().plain
            assert bar.render().plain.rstrip().endswith("%")
            assert bar.render().cell_length <= width


# ---- The event log in the detail column


async def test_long_events_are_cut_in_the_log(running):
    async with running(size=(200, 60)) as (app, _pilot, until):
        bar = app.chat.query_one(StatusBar)
        await until(lambda: bar.snapshot and bar.render().plain.strip())
        assert not app.chat.query_one(Badges).display
        assert BADGE_GLYPH not in bar.render().plain
        log = app.chat.query_one("#events", Static)
        app.chat.log_event("x" * 10**6)
        app.chat.log_event("the next")
        await until(lambda: "the next" in str(log.content))
        assert len(str(log.content)) < EVENT_LENGTH + 1000
