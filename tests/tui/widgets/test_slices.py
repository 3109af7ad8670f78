"""A large answer: few widgets, few of them new or changed at a time."""

from __future__ import annotations

import pytest
from support.app_driver import wait_for
from textual.app import App, ComposeResult
from textual.widgets import Static

from kvchat.conversations.conversation import Message
from kvchat.tui.answering.large_answers import MOST_WIDGETS, slices
from kvchat.tui.widgets import slices as widget
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.slices import MOUNTED_AT_ONCE, Slices
from kvchat.tui.widgets.transcript import Transcript

ROW = "| " + " | ".join(f"cell {column}" for column in range(60)) + " |\n"
LARGE = {"table": ROW * 150, "list": "".join(f"- item {n}\n" for n in range(1500))}


class Page(App[None]):
    def compose(self) -> ComposeResult:
        yield Transcript()


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
    text = LARGE["list"]
    app = App[None]()
    async with app.run_test() as _:
        part = Slices()
        await app.screen.mount(part)
        for end in (len(text) // 3, len(text) // 2, len(text)):
            mounted["redrawn"].clear()
            await part.show(text[:end])
            assert len(mounted["redrawn"]) <= 1
        assert max(mounted["made"]) == MOUNTED_AT_ONCE
        assert [str(one.content) for one in part.query(Static)] == slices(text)
        await part.show("short")
        assert [str(one.content) for one in part.query(Static)] == ["short"]


@pytest.mark.parametrize("name", LARGE)
async def test_a_huge_answer_is_shown_whole_with_few_widgets(name):
    text = f"Here it is:\n\n{LARGE[name]}\nThat was it."
    app = Page()
    async with app.run_test(size=(120, 40)) as _:
        answer = await app.query_one(Transcript).add(Answer())
        for start in range(0, len(text), len(text) // 3):
            answer.feed(text[start : start + len(text) // 3])
            await wait_for(lambda: not answer._is_behind)
            assert sum(1 for _ in answer.walk_children()) < 2 * MOST_WIDGETS
        await answer.finish(Message(parent=None, role="assistant", text=text, ending="eos"), "receipt")
        await wait_for(lambda: "That was it." in str(answer.query("Slices > Static").last(Static).content))
        assert sum(1 for _ in answer.walk_children()) < 2 * MOST_WIDGETS
