"""What the screens that search in a list share: their styles reach both."""

from __future__ import annotations

import pytest
from support.app_driver import opened, press
from textual.widgets import Input

from kvchat.tui.screens.search import SearchScreen


@pytest.mark.parametrize("key", ["ctrl+o", "f9"])
async def test_the_field_is_a_line_and_the_list_lies_in_the_middle(running, key):
    async with running() as (app, _pilot, until):
        press(app, key)
        await until(lambda: opened(app, SearchScreen))
        field = app.screen.query_one(Input)
        await until(lambda: field.size.height == 1 and field.region.x > 2)
