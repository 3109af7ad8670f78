"""The needle demonstration's table, over the fake engine and by itself."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.app_driver import drawn, finished, opened, press, typed
from support.message import lacks
from textual.widgets import Static

from kvchat.config import modes
from kvchat.protocol.figures import Run, Stats
from kvchat.protocol.messages import Compared, Sampling, Variant
from kvchat.tui.comparisons import verdict
from kvchat.tui.screens.compare import CompareScreen, NeedleScreen, needle_table
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.state import RunningComparison


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
