"""A long plain text: few widgets, few of them new or changed at a time."""

from __future__ import annotations

import pytest
from textual.app import App
from textual.widgets import Static

from kvchat.tui.answering.large_answers import slices
from kvchat.tui.widgets import slices as widget
from kvchat.tui.widgets.slices import MOUNTED_AT_ONCE, Slices

TEXT = "".join(f"- item {n}\n" for n in range(1500))


@pytest.fixture
def mounted(monkeypatch):
    """How many slices were made between two turns of the event loop, and which were redrawn."""
    seen: dict[str, list[int]] = {"made": [0], "redrawn": []}

    class Counted(Static):
        def __init__(self, *args: object, **kwargs: object) -> None:
            seen["made"][-1] += 1
            super().__init__(*args, **kwargs)

        def update(self, *args: object, **kwargs: object) -> None:
            seen["redrawn"].append(1)
            super().update(*args, **kwargs)

    async def turn(seconds: float) -> None:
        seen["made"].append(0)

    monkeypatch.setattr(widget, "Static", Counted)
    monkeypatch.setattr(widget.asyncio, "sleep", turn)
    return seen


async def test_few_slices_are_made_at_a_time_and_only_the_last_is_redrawn(mounted):
    app = App[None]()
    async with app.run_test() as _:
        part = Slices()
        await app.screen.mount(part)
        for end in (len(TEXT) // 3, len(TEXT) // 2, len(TEXT)):
            mounted["redrawn"].clear()
            await part.show(TEXT[:end])
            assert len(mounted["redrawn"]) <= 1
        assert max(mounted["made"]) == MOUNTED_AT_ONCE
        assert [str(one.content) for one in part.query(Static)] == slices(TEXT)
        await part.show("short")
        assert [str(one.content) for one in part.query(Static)] == ["short"]
