"""The first screen: questions to begin with, by key and by mouse, at every size."""

from __future__ import annotations

import pytest
from support.app_driver import drawn, finished, press, prompt, typed

from kvchat.paths import BUNDLED
from kvchat.tui.screens.compare import NeedleScreen
from kvchat.tui.widgets.transcript import Transcript
from kvchat.tui.widgets.welcome import ABOUT_BUNDLED, ABOUT_NEEDLE, EXAMPLES, NEEDLE, Welcome, example


def test_numbers_and_nothing_stand_for_questions():
    assert [example(text, BUNDLED) for text in ("", "1", "2", "3")] == [EXAMPLES[True][n] for n in (0, 0, 1, 2)]
    assert [example(text, "other") for text in ("3", "4", "5", " ", "1 a")] == [EXAMPLES[False][2], NEEDLE, *[None] * 3]


def test_before_a_recording_nothing_can_be_asked():
    said = str(Welcome(BUNDLED, {"replay.pause": "F12"}.get, "demo.jsonl")._content())
    assert said.startswith("demo.jsonl")
    assert "F12 pauses it" in said
    assert not any(question in said for question in (*EXAMPLES[True], ABOUT_NEEDLE, ABOUT_BUNDLED))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_it_is_seen_whole_and_gone_after_the_first_question(running, size):
    async with running(size=size) as (app, _pilot, until):
        await until(lambda: app.chat.query(Welcome))
        welcome, transcript = app.chat.query_one(Welcome), app.chat.query_one(Transcript)
        shown = str(welcome.content)
        assert all(text in shown for text in (ABOUT_BUNDLED, *EXAMPLES[True], ABOUT_NEEDLE, "F6 changes how much"))
        await until(lambda: 0 < welcome.region.height <= transcript.region.height)
        assert ("what the figures mean" in shown) == (size[1] >= 40)
        press(app, "enter")
        await until(lambda: finished(app))
        assert app.controller.state.conversation.turns[0].content == EXAMPLES[True][0]
        assert not app.chat.query(Welcome)
        typed(app, "2")
        await until(lambda: finished(app, 2))
        assert app.controller.state.conversation.turns[2].content == "2"


async def test_a_number_or_a_click_asks(running):
    async with running() as (app, pilot, until):
        typed(app, "3")
        await until(lambda: finished(app))
        assert app.controller.state.conversation.turns[0].content == EXAMPLES[True][2]
        assert not prompt(app).text
        await app.controller.new()
        await until(lambda: app.chat.query(Welcome))
        lines = str(app.chat.query_one(Welcome).content)
        welcome = app.chat.query_one(Welcome)
        await until(lambda: welcome.region.height)
        row = next(y for y in range(welcome.region.height) if EXAMPLES[True][1] in welcome.render_line(y).text)
        assert EXAMPLES[True][1] in lines
        line = welcome.region.y + row  # where the screen shows it, once it does
        await until(lambda: EXAMPLES[True][1] in drawn(app).splitlines()[line])
        await pilot.click(Welcome, offset=(8, row))
        await until(lambda: finished(app))
        assert app.controller.state.conversation.turns[0].content == EXAMPLES[True][1]


async def test_the_needle_is_one_key_away_and_leads_back_to_the_first_screen(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        typed(app, "4")
        await until(lambda: isinstance(app.screen, NeedleScreen) and app.screen.shown.is_over)
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        assert app.chat.query(Welcome)
