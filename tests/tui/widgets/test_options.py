"""Lists of lines to choose from."""

from __future__ import annotations

import pytest
from rich.style import Style
from support.app_driver import finished, press, prompt, typed
from textual.events import Click
from textual.widgets import OptionList


@pytest.mark.parametrize("key", ["f2", "f9", "ctrl+o", "ctrl+p", "/"])
async def test_a_click_on_a_line_that_is_no_more_chooses_nothing(running, key):
    async with running() as (app, pilot, until):
        press(app, key)
        await until(lambda: any(shown.display for shown in app.screen.query(OptionList)))
        for shown in app.screen.query(OptionList):
            line = Style.from_meta({"option": shown.option_count})
            shown.post_message(Click(shown, 1, 1, 0, 0, 1, False, False, False, style=line))
        await pilot.pause()
        assert app._exception is None
        if app.screen is not app.chat:
            app.screen.dismiss()
        prompt(app).load_text("")
        typed(app, "hello")
        await until(lambda: finished(app))
