"""The settings screen, driven by keys and the mouse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.app_driver import opened, press, toasts
from textual.widgets import Input, OptionList, Static

from kvchat.config.schema import Settings
from kvchat.config.sources import Resolved, file_source
from kvchat.foreign_text import visible
from kvchat.tui.screens.settings import SettingsScreen


@pytest.fixture
def config(config, tmp_path):
    return replace(config, config_file=tmp_path / "config.toml")


def text_of(app, selector):
    return str(app.screen.query_one(selector, Static).content)


def rows(app):
    options = app.screen.query_one("#list", OptionList)
    return [str(options.get_option_at_index(index).prompt) for index in range(options.option_count)]


def focused(app):
    return app.screen.focused.id if app.screen.focused else None


async def find(app, until, words):
    press(app, "f2")
    await until(lambda: opened(app, SettingsScreen) and len(rows(app)) > 2)
    app.screen.query_one("#find", Input).value = words
    await until(lambda: len(rows(app)) == 2)


async def retype(app, until, text):
    """Put another text into the line and press Enter; Textual deletes later than it inserts."""
    field = app.screen.query_one("#value", Input)
    press(app, *["backspace"] * len(field.value))
    await until(lambda: not field.value)
    press(app, *text)
    await until(lambda: field.value == text)
    press(app, "enter")


async def edit(app, until, part):
    """Open the setting that was found; the keys that follow are for ``part``."""
    press(app, "enter")
    await until(lambda: focused(app) == part)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_a_value_is_found_refused_changed_and_kept(running, config, size):
    async with running(size=size) as (app, _pilot, until):
        await find(app, until, "sampling.temperature")
        await until(lambda: "Takes a number from 0 to 100." in text_of(app, "#about"))
        await edit(app, until, "value")
        await retype(app, until, "300")
        await until(lambda: "300" in text_of(app, "#refusal"))
        for selector in ("#about", "#value", "#refusal", "KeyHints"):
            widget = app.screen.query_one(selector)
            await until(lambda widget=widget: widget.region and app.screen.region.contains_region(widget.region))
        await retype(app, until, "0.25")
        await until(lambda: app.controller.state.sampling.temperature == 0.25)
        await until(lambda: any("● temperature" in row and "0.25" in row for row in rows(app)))
        press(app, "ctrl+s", "f2")
        await until(lambda: app.screen is app.chat)
    assert file_source(config.config_file).values == {("sampling", "temperature"): 0.25}


async def test_a_choice_is_made_by_mouse_and_taken_back_by_a_key(running):
    async with running() as (app, pilot, until):
        await find(app, until, "ui.theme")
        await until(lambda: app.screen.query_one("#list").region.height > 1)
        await pilot.click("#list", offset=(4, 1))
        place, choices = app.theme_names.index("kvchat-light"), app.screen.query_one("#choices")
        await until(lambda: choices.has_focus and choices.region.height > place)
        await pilot.click("#choices", offset=(4, place))
        await until(lambda: app.theme == "kvchat-light")
        press(app, "ctrl+d")
        await until(lambda: app.theme == "kvchat-dark")


async def test_a_mode_is_chosen_by_keys_and_shown_when_the_engine_has_switched(running):
    async with running() as (app, _pilot, until):
        await find(app, until, "kv.mode")
        await edit(app, until, "choices")
        press(app, "down", "enter")
        await until(lambda: app.controller.state.mode == "freeze" and focused(app) == "find")
        await until(lambda: "freeze" in rows(app)[1])
        await edit(app, until, "choices")
        press(app, "escape", "escape")
        await until(lambda: app.screen is app.chat and "last until kvchat is closed" in toasts(app))


async def test_a_key_is_changed_and_works(running):
    async with running() as (app, _pilot, until):
        await find(app, until, "keys mode.next")
        await edit(app, until, "value")
        await retype(app, until, "f12")
        await until(lambda: app.keys == {"mode.next": "f12"} and focused(app) == "find")
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        press(app, "f12")
        await until(lambda: app.controller.state.mode == "freeze")


async def test_a_file_without_saving_and_foreign_text_are_harmless(running, config):
    settings = Settings.model_validate({"model": {"name": "\x1b]0;x\x07[b]evil[/b]"}})
    foreign = Resolved(settings, {("model", "name"): "\x9bm.toml:1"})
    async with running(replace(config, config_file=None, resolved=foreign)) as (app, _pilot, until):
        await find(app, until, "model.name")
        await until(lambda: "[b]evil[/b]" in rows(app)[1] and "evil" in text_of(app, "#about"))
        shown = "".join(rows(app)) + text_of(app, "#about")
        assert visible(shown.replace("\n", "")) == shown.replace("\n", "")
        await edit(app, until, "value")
        press(app, "x", "enter")
        await until(lambda: app.settings.unsaved)
        press(app, "ctrl+s")
        await until(lambda: "not saved here" in text_of(app, "#refusal"))
