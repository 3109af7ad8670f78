"""Help lists every key, command and mode."""

from dataclasses import replace

from support.app_driver import ask, drawn, is_open, press
from textual.command import CommandInput, CommandList
from textual.widgets import Input

from kvchat.config.modes import mode_names, registered
from kvchat.tui.actions import ACTIONS, BY_ID
from kvchat.tui.screens.base import Palette
from kvchat.tui.screens.help import HelpScreen, figure_rows, key_rows, matching, mode_rows
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.themes import ANSI


def test_every_mode_is_listed_with_its_parameters():
    names = [name for name, _ in mode_rows([registered()[mode] for mode in mode_names()])]
    assert [name for name in names if not name.startswith(" ")] == mode_names()
    assert names[names.index("speculative") + 1 :] == [f"  {name}" for name in registered()["speculative"].model_fields]


def test_figures_are_listed_by_place_and_mode():
    rows = figure_rows([*registered().values()])
    labels = [label for label, _ in rows]
    freeze = labels.index("freeze mode")
    assert [label.strip() for label in labels[freeze + 1 : freeze + 4]] == list(registered()["freeze"].figures)
    assert {"this answer", "status bar and receipts", "  first token", "  KL", "  prefilled", "  fetched in"} <= set(
        labels
    )
    assert {"/stats", "/plan", "  workspace", "  K/V stored"} <= set(labels)
    assert [label for label, text in rows if label.startswith(" ") and not text] == []


def test_current_keys_are_listed():
    listed = key_rows({"panels": "f10,ctrl+t"})
    rows = dict(listed)
    assert "F7" not in rows
    assert rows["F10 / Ctrl+T"] == BY_ID["panels"].doc
    assert len(listed) == sum(bool(action.keys) for action in ACTIONS)


def test_the_filter_keeps_rows_that_contain_every_word():
    rows = [("/export FILE", "write the conversation"), ("Ctrl+J", "newline")]
    assert matching("", "Commands", rows) == matching(" ", "Commands", rows) == rows
    assert matching("EXPORT con", "Commands", rows) == rows[:1]
    assert matching("export newline", "Commands", rows) == []
    assert matching("commands new", "Commands", rows) == rows[1:]


def test_a_parameter_is_found_by_name_and_mode():
    rows = [("sync", "a"), ("  budget", "b"), ("  mem", "c"), ("freeze", "d"), ("  budget", "e")]
    assert matching("budget", "KV modes", rows) == [rows[0], rows[1], rows[3], rows[4]]
    assert matching("freeze budget", "KV modes", rows) == rows[3:]


async def test_help_works_in_the_ansi_theme_and_reports_no_match(running, config):
    """The theme names its colors as Textual does, which Rich cannot parse."""
    async with running(replace(config, theme=ANSI), ready=False) as (app, _pilot, until):
        press(app, "f1")
        await until(lambda: is_open(app, HelpScreen) and "Ctrl+J" in drawn(app))
        nothing, field = app.screen.query_one("#no-match"), app.screen.query_one(Input)
        for typed, is_reported in (("export", False), ("no such words", True), (" ", False)):
            field.value = typed
            await until(lambda expected=is_reported: nothing.display is expected)


# ---- A screen closes only itself, even if the key is pressed twice


SCREENS = ("f1", "f2", "f9", "ctrl+o", "shift+f7", "ctrl+p")


async def test_dismissing_a_screen_twice_closes_only_that_screen(running):
    async with running() as (app, pilot, until):
        for key in SCREENS:
            press(app, key)
            await until(lambda: app.screen is not app.chat and app.screen.focused)
            below = app.screen
            if key != "f2":
                app.action_settings()
                await until(lambda: is_open(app, SettingsScreen))
                for _ in range(2):
                    below.dismiss()
                assert app.screen_stack[-2:] == [below, app.screen]
                assert isinstance(app.screen, SettingsScreen)
                app.screen.dismiss()
            for _ in range(3):
                below.dismiss()
            await until(lambda below=below: app.screen is app.chat and not below.is_attached)
        for key in SCREENS * 2:
            press(app, key)
            await pilot.pause()
        await until(app._keys_in_turn._task.done)
        kinds = [type(screen) for screen in app.screen_stack]
        assert len(kinds) == len(set(kinds)) > 3
        while app.screen is not app.chat:
            screen = app.screen
            screen.dismiss()
            await until(lambda screen=screen: not screen.is_attached)
        app.action_command_palette()
        await until(lambda: is_open(app, Palette) and app.screen.query(CommandInput))
        closing, commands = app.screen, app.screen.query_one(CommandList)
        closing.dismiss()
        await until(lambda: not closing.is_attached)
        closing._refresh_command_list(commands, [], True)  # late results of its search
        await closing._gather_commands("mode").wait()
        await ask(app, "hello")
