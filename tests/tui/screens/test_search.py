"""What the screens that search in a list share: their styles reach both."""

from __future__ import annotations

import pytest
from support.app_driver import opened, press
from textual.widgets import Input, OptionList

from kvchat.tui.screens.base import SearchScreen


@pytest.mark.parametrize("key", ["ctrl+o", "f9"])
async def test_the_field_is_a_line_and_the_list_lies_in_the_middle(running, key):
    async with running() as (app, _pilot, until):
        press(app, key)
        await until(lambda: opened(app, SearchScreen))
        field = app.screen.query_one(Input)
        await until(lambda: field.size.height == 1 and field.region.x > 2)


@pytest.mark.parametrize("key", ["ctrl+o", "f9", "ctrl+p"])
async def test_a_page_of_a_list_without_room_is_nowhere(running, key):
    async with running() as (app, _pilot, until):
        press(app, key)
        await until(lambda: app.screen is not app.chat and app.screen.query(OptionList))
        screen, options = app.screen, app.screen.query_one(OptionList)
        options.styles.display = "none"
        await until(lambda: not options.size)
        options.clear_options()
        options.add_option("one")
        options.highlighted = 0
        press(app, "pagedown", "pageup", "escape")
        await until(lambda: app.screen is app.chat and not screen.is_attached)
