"""Badges: always in the status bar, by glyph and words; with their reasons in the panels."""

from __future__ import annotations

import pytest
from support.app_driver import typed

from kvchat.tui.widgets.bars import GLYPH, STYLE, Badges, StatusBar, short

PAGEABLE = "pageable host memory: cudaHostRegister: out of memory (2)"
EAGER = "no CUDA graph: RuntimeError: operation not permitted when stream is capturing"


def test_without_room_they_are_counted_and_never_colored_only():
    assert short((), 80).plain == ""
    both = short((PAGEABLE, EAGER), 60)
    assert both.plain == f" {GLYPH} pageable host memory · no CUDA graph "
    assert short((PAGEABLE, EAGER), len(both)).plain == both.plain
    assert short((PAGEABLE, EAGER), len(both) - 1).plain == f" {GLYPH} 2 "
    assert [span.style for span in both.spans] == [STYLE]


@pytest.mark.parametrize(
    ("width", "words"), [(40, f"{GLYPH} 2"), (80, "memory · no CUDA graph"), (120, "memory · no CUDA graph")]
)
async def test_the_status_bar_shows_them_at_every_width_while_it_answers(running, monkeypatch, width, words):
    monkeypatch.setenv("FAKE_BADGES", f"{PAGEABLE}|{EAGER}")
    async with running(size=(width, 24)) as (app, _pilot, until):
        bar = app.chat.query_one(StatusBar)
        await until(lambda: words in bar.render().plain)
        typed(app, "slow")
        await until(lambda: "tok/s" in bar.render().plain and bar.size.width == width)
        assert words in bar.render().plain
        assert bar.render().plain.rstrip().endswith("%")
        assert bar.render().cell_length <= width


async def test_the_panels_tell_the_reasons(running, monkeypatch):
    monkeypatch.setenv("FAKE_BADGES", f"{PAGEABLE}|{EAGER}")
    async with running(size=(120, 40)) as (app, _pilot, until):
        badges = app.chat.query_one(Badges)

        def shown() -> str:
            return " ".join("".join(strip.text for strip in badges.render_lines(badges.size.region)).split())

        await until(lambda: badges.size.height > 2 and "out of memory (2)" in shown() and shown().count(GLYPH) == 2)


async def test_without_badges_nothing_is_there(running):
    async with running(size=(120, 40)) as (app, _pilot, until):
        bar = app.chat.query_one(StatusBar)
        await until(lambda: bar.snapshot and bar.render().plain.strip())
        assert not app.chat.query_one(Badges).display
        assert GLYPH not in bar.render().plain
