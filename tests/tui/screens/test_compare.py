"""The comparison's screen over the fake engine."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console
from support.app_driver import drawn, finished, opened, press, typed
from support.message import lacks
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvchat.config import modes
from kvchat.protocol.figures import Run, Stats
from kvchat.protocol.messages import Compared, Comparing, Sampling, Variant
from kvchat.tui.comparisons import FOUND, MISSED, STOPPED, WAITING, needle_rows, verdict
from kvchat.tui.screens.compare import MARK, CompareScreen, NeedleScreen, answer_text, needle_table
from kvchat.tui.screens.settings import SettingsScreen
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
        await until(lambda: opened(app, CompareScreen) and "differs from token 3" in shown(app, "#verdict"))
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


# ---- The needle demonstration's table, over the fake engine and by itself


@pytest.mark.parametrize("size", [(50, 20), (120, 40)])
async def test_every_mode_has_a_row_and_esc_closes(running, size):
    async with running(size=size) as (app, _pilot, until):
        typed(app, "/needle 512")
        await until(lambda: isinstance(app.screen, NeedleScreen) and "found it" in text(app, "#verdict"))
        assert not lacks(text(app, "#verdict"), "full found", "50 %", "streaming, sync, speculative did not")
        assert "BY F" in text(app, "#question")
        await until(lambda: all(f"{mode} " in drawn(app) for mode in modes.mode_names()) and "50 %" in drawn(app))
        assert not app.controller.state.conversation.messages
        press(app, "escape")
        await until(lambda: app.screen is app.chat)


async def test_a_needle_over_a_comparison_has_a_screen_of_its_own(running):
    async with running() as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        press(app, "f8")
        await until(lambda: opened(app, CompareScreen) and app.screen.shown.is_over)
        await app.chat.run_command("/needle 512")
        await until(lambda: isinstance(app.screen, NeedleScreen) and app.screen.shown.is_over)
        assert [type(screen) for screen in app.screen_stack[-2:]] == [CompareScreen, NeedleScreen]


async def test_a_needle_below_another_screen_is_shown_on(running):
    async with running() as (app, _pilot, until):
        await app.chat.run_command("/needle 512")
        app.action_settings()
        needle = app.controller.comparisons.running
        await until(lambda: opened(app, SettingsScreen) and needle.is_over)
        assert [type(screen) for screen in app.screen_stack[-2:]] == [NeedleScreen, SettingsScreen]


def text(app, selector: str) -> str:
    return "".join(str(static.content) for static in app.screen.query(selector).results(Static))


def comparison(answers: dict[str, str]) -> RunningComparison:
    """A needle whose fact is Biscuit, with these answers by mode."""
    variants = tuple(map(Variant, answers))
    shown = RunningComparison("What is my cat called?", "m", variants, Sampling(), fact="Biscuit")
    stats = Stats(read_share=0.25, recalled_bytes=2**20, decode_tokens_per_s=41.5)
    shown.finish(Compared(tuple(Run(mode, {}, (said,), "eos", stats) for mode, said in answers.items()), 2000))
    return shown


@pytest.mark.parametrize("room", [30, 50, 74, 86])
def test_the_figures_keep_their_width_under_long_answers(room):
    console = Console(width=room, file=io.StringIO())
    console.print(
        needle_table(comparison(dict.fromkeys(modes.mode_names(), "It is Biscuit. " * 40)), "green", "red", room)
    )
    said = console.file.getvalue()
    assert all(f"{mode} " in said for mode in modes.mode_names())
    assert said.count("✓ found") == 5
    assert said.count("25 %") == 5
    assert said.count("41.5") == (5 if room >= 74 else 0)


def test_where_full_mode_misses_one_sentence_says_what_that_means():
    missed = verdict(comparison({"full": "I do not know.", "sync": "biscuit"}))
    assert missed.startswith("full ")
    assert missed.count(".") == 1
    assert not lacks(verdict(comparison({"full": "biscuit", "sync": "No."})), "full found", "25 %")


# ---- Rows of a needle search: waiting, found, missed, refused


MODES = ("full", "streaming", "sync", "freeze")


def test_rows_fill_while_the_modes_answer():
    shown = RunningComparison("What?", "bundled", tuple(map(Variant, MODES)), Sampling(), fact="123")
    shown.note(Comparing(1, "It is\n123", 4))
    assert needle_rows(shown) == [
        ("full", "", WAITING, "", "", ""),
        ("streaming", "It is 123", WAITING, "", "", ""),
        ("sync", "", WAITING, "", "", ""),
        ("freeze", "", WAITING, "", "", ""),
    ]
    runs = (
        Run("full", {}, ("It is ", "123."), stats=Stats(read_share=1.0, decode_tokens_per_s=20.0)),
        Run("streaming", {}, ("It is \x1b7.",), stats=Stats(read_share=0.25)),
        Run("sync", {}, refusal="It does not fit."),
        Run("freeze", {}, ("It",), "stopped", Stats(read_share=0.5)),
    )
    shown.finish(Compared(runs, 900))
    assert needle_rows(shown) == [
        ("full", "It is 123.", FOUND, "100 %", "0 B", "20.0"),
        ("streaming", "It is ␛7.", MISSED, "25 %", "0 B", "n/a"),
        ("sync", "It does not fit.", "refused", "", "", ""),
        ("freeze", "It", STOPPED, "50 %", "0 B", "n/a"),
    ]
    assert not lacks(verdict(shown), "full found", "100 %", "streaming did not")
