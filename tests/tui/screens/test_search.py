"""What the screens that search in a list share: their styles reach both."""

from __future__ import annotations

from support.app_driver import opened, press
from textual.widgets import Input, OptionList

from kvchat.tui.screens.base import SearchScreen


async def test_the_field_is_a_line_and_the_list_lies_in_the_middle(running):
    async with running() as (app, _pilot, until):
        for key in ("ctrl+o", "f9"):
            press(app, key)
            await until(lambda: opened(app, SearchScreen))
            field = app.screen.query_one(Input)
            await until(lambda field=field: field.size.height == 1 and field.region.x > 2)
            press(app, "escape")
            await until(lambda: app.screen is app.chat)


async def test_a_page_of_a_list_without_room_is_nowhere(running):
    async with running() as (app, _pilot, until):
        for key in ("ctrl+o", "f9", "ctrl+p"):
            press(app, key)
            await until(lambda: app.screen is not app.chat and app.screen.query(OptionList))
            screen, options = app.screen, app.screen.query_one(OptionList)
            options.styles.display = "none"
            await until(lambda options=options: not options.size)
            options.clear_options()
            options.add_option("one")
            options.highlighted = 0
            press(app, "pagedown", "pageup", "escape")
            await until(lambda screen=screen: app.screen is app.chat and not screen.is_attached)
