"""The comparison's screen over the fake engine."""

from __future__ import annotations

import asyncio

import pytest
from support.app_driver import finished, opened, press, typed
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvchat.protocol.figures import Run
from kvchat.protocol.messages import Comparing, Sampling, Variant
from kvchat.tui.screens.compare import MARK, CompareScreen, answer_text
from kvchat.tui.state import Phase, RunningComparison


def shown(app, selector: str) -> str:
    return "\n".join(str(static.content) for static in app.screen.query(selector).results(Static))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_f8_shows_both_answers_and_w_writes_them(running, size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with running(size=size) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        press(app, "f8")
        await until(lambda: opened(app, CompareScreen) and "own way from token 3" in shown(app, "#verdict"))
        said = f"All said {MARK}by full here.\nAll said {MARK}by speculative here."
        await until(lambda: shown(app, "#answers Static") == said)
        one, other = app.screen.query(VerticalScroll).results(VerticalScroll)
        await until(lambda: min(one.region.height, other.region.height) > 3)
        is_beside = size[0] >= 100  # where there is room
        await until(lambda: (one.region.y == other.region.y, one.region.x != other.region.x) == (is_beside, is_beside))
        press(app, "w")
        await until(lambda: len(list(tmp_path.glob("comparison-*"))) == 2)
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        assert app.controller.state.phase is Phase.READY


async def test_what_is_reported_while_the_screen_is_composed_is_drawn_when_it_is(running):
    async with running() as (app, _pilot, until):
        variants = tuple(map(Variant, ("full", "sync")))
        shown_now = RunningComparison("What?", "bundled", variants, Sampling())
        screen = CompareScreen(app.controller.comparisons, shown_now)
        app.push_screen(screen)
        while not screen.is_mounted:
            screen.show()
            await asyncio.sleep(0)
        shown_now.note(Comparing(1, "so far", 1))
        screen.show()
        await until(lambda: "so far" in shown(app, "#answers Static"))


async def test_esc_stops_and_then_closes(running):
    async with running() as (app, _pilot, until):
        typed(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        press(app, "escape")
        await until(lambda: finished(app))
        typed(app, "/compare sync full")
        await until(lambda: opened(app, CompareScreen) and "full answers" in shown(app, "#verdict"))
        press(app, "escape")
        await until(lambda: app.controller.state.phase is Phase.READY)
        assert isinstance(app.screen, CompareScreen)
        press(app, "escape")
        await until(lambda: app.screen is app.chat)


def test_markup_and_control_characters_are_text():
    run = Run("full", {}, ("[b]", "\x1b[0m", "end"))
    assert answer_text(run, 1).plain == f"[b]{MARK}␛[0mend"
    assert answer_text(run, None).plain == "[b]␛[0mend"
    assert answer_text(Run("sync", {}, refusal="It does [not] fit."), 0).plain == "It does [not] fit."
