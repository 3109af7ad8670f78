"""Mapping the stored context to columns."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.app_driver import finished, opened, press, prompt, toasts, typed
from textual.widgets import Static

from kvchat.protocol.figures import RIBBON
from kvchat.tui.screens.help import HelpScreen
from kvchat.tui.widgets.panels import legend
from kvchat.tui.widgets.ribbon import (
    CLASSES,
    GLYPHS,
    TICK,
    Ribbon,
    glyph,
    mean_shares,
    part_at,
    part_of,
    squeeze,
    tokens_of,
)
from kvchat.tui.widgets.transcript import Transcript
from kvchat.units import BARS


def test_every_state_has_a_color_and_what_is_not_read_a_glyph_of_its_own():
    assert set(CLASSES) == set(RIBBON)
    assert len({*GLYPHS.values(), *BARS, TICK}) == len(GLYPHS) + len(BARS) + 1
    assert all(word in legend(True).plain for word in RIBBON.values())


def test_the_height_of_a_part_is_the_share_that_is_read():
    assert "".join(glyph("D", share) for share in range(10)) == "▁▁▂▃▄▄▅▆▇█"
    assert [glyph(letter, 0) for letter in "RHFX"] == ["▲", "·", "~", "×"]
    assert (glyph("H", 2), glyph("R", 9)) == ("▂", "▲")


@pytest.mark.parametrize(
    ("digits", "width", "shares"), [("", 5, []), ("90", 5, [9, 0]), ("9900", 2, [9, 0]), ("90", 1, [4])]
)
def test_shares_of_groups_are_means(digits, width, shares):
    assert mean_shares(digits, width) == shares


@pytest.mark.parametrize(
    ("cells", "width", "shown"),
    [
        ("SDDW", 10, "SDDW"),
        ("SHHHHHHDHHHW", 3, "SHW"),
        ("HHHR" * 2, 2, "RR"),
        ("HHD" * 3, 3, "HHH"),
        ("", 5, ""),
    ],
)
def test_squeezing_keeps_the_majority_and_what_is_rare(cells, width, shown):
    assert squeeze(cells, width) == shown


@given(st.text("SWDRHX", min_size=1, max_size=300), st.integers(1, 120))
def test_squeezed_ribbons_fit_and_lose_no_recall(cells, width):
    shown = squeeze(cells, width)
    assert len(shown) == min(len(cells), width)
    assert ("R" in shown) == ("R" in cells)


@given(st.integers(1, 1024), st.integers(1, 200), st.integers(1, 64))
def test_parts_cover_all_tokens_without_gap_or_overlap(cells, width, cell_tokens):
    total = cells * cell_tokens - cell_tokens // 2
    ranges = [tokens_of(column, cell_tokens, cells, width, total) for column in range(min(cells, width))]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


def test_a_token_lies_in_the_part_that_shows_it():
    for cells, width in ((10, 40), (1024, 60), (60, 60)):
        for position in range(0, cells * 32, 37):
            part = part_of(position, 32, cells, width)
            start, end = tokens_of(part, 32, cells, width, cells * 32)
            assert start - 32 <= position < end + 32


async def test_the_first_token_fills_the_whole_width(running):
    async with running() as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        ribbon = app.chat.query_one(Ribbon)
        await until(lambda: ribbon.render_line(0).text.startswith(" KV ███"))
        assert ribbon.render_line(0).text.count("█") > 100


def test_nothing_stored_has_no_tokens():
    assert tokens_of(0, 32, 0, 80, 0) == (0, 0)


@given(cells=st.integers(1, 300), width=st.integers(1, 200))
def test_a_click_finds_the_part_it_shows(cells, width):
    parts = min(cells, width)
    edges = [part * width // parts for part in range(parts + 1)]
    for column in range(width):
        part = part_at(column, parts, width)
        assert edges[part] <= column < edges[part + 1]


async def test_enter_and_a_click_choose_the_message_of_the_part(running):
    async with running() as (app, pilot, until):
        typed(app, "hello there")
        await until(lambda: finished(app))
        typed(app, "and now")
        await until(lambda: finished(app, 2))
        ribbon, transcript = app.chat.query_one(Ribbon), app.chat.query_one(Transcript)
        path = app.controller.state.conversation.path
        await until(lambda: ribbon.snapshot.total == path[3].stats.total_tokens)
        ribbon.focus()
        press(app, "enter")
        await until(lambda: transcript.chosen == path[1].id and transcript.has_focus)
        await until(lambda: ribbon.region.height == 1 and app.chat.get_widget_at(100, ribbon.region.y)[0] is ribbon)
        await pilot.click(Ribbon, offset=(100, 0))
        await until(lambda: transcript.chosen == path[3].id and transcript.has_focus)
        assert not ribbon.has_focus


async def test_a_token_of_no_message_is_told(running):
    async with running() as (app, _pilot, until):
        app.chat.post_message(Ribbon.Picked(7))
        await until(lambda: "Token 7 is in no message shown" in toasts(app))


@pytest.mark.parametrize("size", [(44, 14), (80, 24), (120, 40)])
async def test_a_focused_ribbon_has_a_legend_of_what_it_shows(running, monkeypatch, size):
    monkeypatch.setenv("FAKE_GPU", "1")
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running(size=size) as (app, _pilot, until):
        typed(app, "/mode streaming")
        await until(lambda: app.controller.state.mode == "streaming")
        typed(app, "alpha beta")
        await until(lambda: finished(app))
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: ribbon.size.height == 3)
        await until(lambda: ribbon.render_line(2).text.startswith(" █ sink  █ window  × out of reach"))
        assert ("all heads" in ribbon.render_line(2).text) == (size[0] >= 80)


async def test_without_a_gpu_no_word_names_a_device(running, monkeypatch):
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running(size=(200, 60)) as (app, _pilot, until):
        typed(app, "alpha beta")
        await until(lambda: finished(app))
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: "ready to read, read by all heads" in ribbon.render_line(1).text)
        assert "█ ready to read" in ribbon.render_line(2).text
        shown = str(app.chat.query_one("#legend", Static).content)
        assert "stored only" in shown
        assert "device" not in shown
        assert "host" not in shown
        press(app, "f1")
        await until(lambda: opened(app, HelpScreen))
        assert str(app.screen.query(Static).last().content) == shown


async def test_the_ribbon_shows_the_text_under_its_cursor(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running() as (app, _pilot, until):
        typed(app, "alpha beta")
        await until(lambda: finished(app))
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: ribbon.page_text.startswith("alpha beta alpha"))
        press(app, "right")
        await until(lambda: ribbon.cursor == 1 and ribbon.page_text and ribbon.size.height == 3)
        await until(lambda: "32–63 on the device, read by all heads" in ribbon.render_line(1).text)
        press(app, "escape")
        await until(lambda: prompt(app).has_focus)
