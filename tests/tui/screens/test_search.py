"""What the screens that search in a list share: their styles reach both."""

from __future__ import annotations

import pytest
from textual.widgets import Input

from kvchat.tui.screens.search import SearchScreen


@pytest.mark.parametrize("key", ["ctrl+o", "f9"])
async def test_the_field_is_a_line_and_the_list_lies_in_the_middle(running, key):
    async with running() as (app, pilot, until):
        await pilot.press(key)
        await until(lambda: isinstance(app.screen, SearchScreen) and app.screen.query_one(Input).size.height)
        assert app.screen.query_one(Input).size.height == 1
        assert app.screen.query_one(Input).region.x > 2
