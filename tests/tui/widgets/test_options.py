"""Lists of lines to choose from."""

from __future__ import annotations

from rich.style import Style
from support.app_driver import finished, press, prompt, typed
from textual.events import Click
from textual.widgets import OptionList


async def test_a_click_on_a_line_that_is_no_more_chooses_nothing(running):
    async with running() as (app, pilot, until):
        for key in ("f2", "f9", "ctrl+o", "ctrl+p", "/"):
            press(app, key)
            await until(lambda: any(shown.display for shown in app.screen.query(OptionList)))
            for shown in app.screen.query(OptionList):
                line = Style.from_meta({"option": shown.option_count})
                shown.post_message(Click(shown, 1, 1, 0, 0, 1, False, False, False, style=line))
            await pilot.pause()
            assert app._exception is None
            if app.screen is not app.chat:
                app.screen.dismiss()
            await until(lambda: app.screen is app.chat)
            prompt(app).load_text("")
        typed(app, "hello")
        await until(lambda: finished(app))
