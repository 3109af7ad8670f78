"""The needle demonstration's table, over the fake engine and by itself."""

from __future__ import annotations

import pytest
from support.app_driver import finished, opened, press, typed
from textual.widgets import Static

from kvchat.tui.screens.compare import CompareScreen
from kvchat.tui.screens.needle import NeedleScreen
from kvchat.tui.screens.settings import SettingsScreen


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_every_mode_has_a_row_and_esc_closes(running, size):
    async with running(size=size) as (app, _pilot, until):
        typed(app, "/needle 512")
        await until(lambda: isinstance(app.screen, NeedleScreen) and "found it" in text(app, "#verdict"))
        assert text(app, "#verdict").startswith("streaming found it and read 50 %")
        assert "full, freeze did not find it" in text(app, "#verdict")
        assert "by s" in text(app, "#question")
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
