"""Screens close themselves, once."""

from __future__ import annotations

from support.app_driver import finished, opened, press, typed
from textual.command import CommandInput, CommandList
from textual.events import Click

from kvchat.tui.screens.base import Palette
from kvchat.tui.screens.settings import SettingsScreen

SCREENS = ("f1", "f2", "f9", "ctrl+o", "shift+f7", "ctrl+p")


async def test_a_screen_that_closes_twice_does_not_take_the_chat_with_it(running):
    async with running() as (app, _pilot, until):
        for key in SCREENS:
            press(app, key)
            await until(lambda: app.screen is not app.chat and app.screen.focused)
            closing = app.screen
            for _ in range(3):
                closing.dismiss()
            await until(lambda closing=closing: app.screen is app.chat and not closing.is_attached)
        typed(app, "hello")
        await until(lambda: finished(app))


async def test_a_screen_below_another_closes_neither(running):
    async with running() as (app, _pilot, until):
        for below in (key for key in SCREENS if key != "f2"):
            press(app, below)
            await until(lambda: app.screen is not app.chat and app.screen.focused)
            screen = app.screen
            app.action_settings()
            await until(lambda: opened(app, SettingsScreen))
            for _ in range(2):
                screen.dismiss()
            assert app.screen_stack[-2:] == [screen, app.screen]
            assert isinstance(app.screen, SettingsScreen)
            app.screen.dismiss()
            screen.dismiss()
            await until(lambda screen=screen: app.screen is app.chat and not screen.is_attached)


async def test_keys_pressed_in_turn_open_one_screen_of_a_kind(running):
    async with running() as (app, pilot, until):
        for _ in range(4):
            for key in SCREENS:
                press(app, key)
                await pilot.pause()
        await until(app._keys_in_turn._task.done)
        kinds = [type(screen) for screen in app.screen_stack]
        assert len(kinds) == len(set(kinds)) > 3
        while app.screen is not app.chat:
            screen = app.screen
            screen.dismiss()
            await until(lambda screen=screen: not screen.is_attached)


async def test_what_a_closed_palette_still_looks_for_and_finds_ends_nothing(running):
    async with running() as (app, _pilot, until):
        app.action_command_palette()
        await until(lambda: opened(app, Palette) and app.screen.query(CommandInput))
        closing, commands = app.screen, app.screen.query_one(CommandList)
        closing.dismiss()
        await until(lambda: not closing.is_attached)
        closing._refresh_command_list(commands, [], True)
        await closing._gather_commands("mode").wait()
        typed(app, "hello")
        await until(lambda: finished(app))


async def test_a_click_beside_a_terminal_that_has_become_smaller_closes_nothing(running):
    async with running(size=(120, 40)) as (app, pilot, until):
        app.action_command_palette()
        await until(lambda: opened(app, Palette) and app.screen.query(CommandInput))
        click = Click(app.screen, 100, 30, 0, 0, 1, False, False, False, screen_x=100, screen_y=30)
        await pilot.resize_terminal(40, 20)
        await until(lambda: app.screen.region.size == (40, 20))
        app.screen.post_message(click)
        await pilot.pause()
        assert app._exception is None
        assert isinstance(app.screen, Palette)
        app.screen.dismiss()
        typed(app, "hello")
        await until(lambda: finished(app))
