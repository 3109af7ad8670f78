"""The log of events in the details' column."""

from __future__ import annotations

from textual.widgets import Static

from kvchat.tui.widgets.panels import EVENT_LENGTH


async def test_an_event_of_any_length_is_a_line_of_the_log(running):
    async with running(size=(200, 60)) as (app, _pilot, until):
        log = app.chat.query_one("#events", Static)
        app.chat.log_event("x" * 10**6)
        app.chat.log_event("the next")
        await until(lambda: "the next" in str(log.content))
        assert len(str(log.content)) < EVENT_LENGTH + 1000
