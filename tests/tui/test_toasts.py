"""Toasts that go, on a busy machine too."""

from __future__ import annotations

from textual.notifications import Notification
from textual.widgets._toast import Toast


async def test_a_toast_that_is_made_while_its_time_runs_out_goes_and_stops_nothing(running, monkeypatch):
    async with running() as (app, _pilot, until):
        app.notify("read me")
        await until(lambda: len(app._notifications))
        (shown,) = app._notifications
        monkeypatch.setattr(Notification, "time_left", -0.001)
        assert shown.has_expired
        late = Toast(shown)
        assert late._timeout > 0  # else the next line never comes back
        await app.screen.mount(late)
        await until(lambda: not late.is_attached)
