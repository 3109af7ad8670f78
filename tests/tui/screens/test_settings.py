"""The settings screen, driven by keys and the mouse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.app_driver import press
from textual.widgets import Input, OptionList, Static

from kvchat.config.schema import Settings
from kvchat.config.sources import Resolved, file_source
from kvchat.foreign_text import visible
from kvchat.tui.screens.settings import SettingsScreen

SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.fixture
def config(config, tmp_path):
    return replace(config, config_file=tmp_path / "config.toml")


def text_of(app, selector):
    return str(app.screen.query_one(selector, Static).content)


def rows(app):
    options = app.screen.query_one("#list", OptionList)
    return [str(options.get_option_at_index(index).prompt) for index in range(options.option_count)]


async def find(app, pilot, until, words):
    await pilot.press("f2")
    await until(lambda: isinstance(app.screen, SettingsScreen) and app.screen.query(OptionList) and rows(app))
    app.screen.query_one("#find", Input).value = words
    await until(lambda: len(rows(app)) == 2)


@pytest.mark.parametrize("size", SIZES)
async def test_a_value_is_found_refused_changed_and_kept(running, config, size):
    async with running(size=size) as (app, pilot, until):
        await find(app, pilot, until, "sampling temperature")
        assert "Takes a number from 0 to 100. A change counts at once." in text_of(app, "#about")
        await pilot.press("enter", *"300", "enter")
        await until(lambda: "300" in text_of(app, "#refusal"))
        for widget in ("#about", "#value", "#refusal", "#hints"):
            assert app.screen.region.contains_region(app.screen.query_one(widget).region), widget
        await pilot.press(*["backspace"] * 6, *"0.25", "enter")
        await until(lambda: app.controller.state.sampling.temperature == 0.25)
        assert any("● temperature" in row and "0.25" in row for row in rows(app))
        await pilot.press("ctrl+s", "f2")
        await until(lambda: app.screen is app.chat)
    assert file_source(config.config_file).values == {("sampling", "temperature"): 0.25}


async def test_a_choice_is_made_by_mouse_and_taken_back_by_a_key(running):
    async with running() as (app, pilot, until):
        await find(app, pilot, until, "ui.theme")
        await pilot.click("#list", offset=(4, 1))
        await until(lambda: app.screen.query_one("#choices").has_focus)
        words = app.theme_names
        await pilot.click("#choices", offset=(4, words.index("kvchat-light")))
        await until(lambda: app.theme == "kvchat-light")
        press(app, "ctrl+d")
        await until(lambda: app.theme == "kvchat-dark")


async def test_a_mode_is_chosen_by_keys_and_shown_when_the_engine_has_switched(running):
    async with running() as (app, pilot, until):
        await find(app, pilot, until, "kv.mode")
        await pilot.press("enter", "down", "enter")
        await until(lambda: app.controller.state.mode == "freeze")
        await until(lambda: "freeze" in rows(app)[1])
        await pilot.press("enter", "escape", "escape")
        await until(lambda: app.screen is app.chat)
        assert any("hold until kvchat is closed" in toast.message for toast in app._notifications)


async def test_a_key_is_changed_and_works(running):
    async with running() as (app, pilot, until):
        await find(app, pilot, until, "keys mode.next")
        await pilot.press("enter", *["backspace"] * 2, *"f8", "enter")
        await until(lambda: app.keys == {"mode.next": "f8"})
        await pilot.press("escape", "f8")
        await until(lambda: app.controller.state.mode == "freeze")


async def test_a_file_without_saving_and_foreign_text_are_harmless(running, config):
    settings = Settings.model_validate({"model": {"name": "\x1b]0;x\x07[b]evil[/b]"}})
    foreign = Resolved(settings, {("model", "name"): "\x9bm.toml:1"})
    async with running(replace(config, config_file=None, resolved=foreign)) as (app, pilot, until):
        await find(app, pilot, until, "model.name")
        assert "[b]evil[/b]" in rows(app)[1]
        drawn = "".join(rows(app)) + text_of(app, "#about")
        assert visible(drawn) == drawn
        await pilot.press("enter", "x", "enter", "ctrl+s")
        await until(lambda: "not saved here" in text_of(app, "#refusal"))
