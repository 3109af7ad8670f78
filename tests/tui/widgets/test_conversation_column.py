"""The column of conversations: titles, the mark on the current one, and clicks."""

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import OptionList

from kvchat.conversations.store import Summary
from kvchat.tui.widgets.welcome import ConversationColumn

CAT = Summary(id="1", title="A cat", updated=2.0, messages=4)
DOG = Summary(id="2", title="A [b]dog[/b] \x1b[31mwith a very, very long title", updated=1.0, messages=2)


class ColumnApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[str] = []

    def compose(self):
        yield ConversationColumn()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.chosen.append(event.option.id or "")


@pytest.fixture
async def column():
    app = ColumnApp()
    async with app.run_test(size=(60, 10)) as pilot:
        column = app.query_one(ConversationColumn)
        column.show([CAT, DOG], "1")
        await pilot.pause()
        yield column


def lines(column):
    shown = [column.render_line(y).text.strip() for y in range(column.size.height)]
    return [line for line in shown if line]


async def test_titles_are_one_line_without_control_characters(column):
    assert lines(column) == ["A cat", "A [b]dog[/b] ␛[31mwith a ve…"]
    assert column.highlighted == 0


async def test_a_click_selects_without_moving_the_mark(column):
    await Pilot(column.app).click(column, offset=(3, 2))
    assert (column.app.chosen, column.highlighted) == (["2"], 0)


async def test_the_mark_follows_the_current_conversation(column):
    column.show([CAT, DOG], "2")
    assert column.highlighted == 1
    column.show([CAT, DOG], "3")
    assert column.highlighted is None
    column.show([], "3")
    assert lines(column) == ["none saved yet"]


async def test_nothing_is_said_to_be_saved_or_not_before_the_list_is_known():
    app = ColumnApp()
    async with app.run_test(size=(60, 10)) as pilot:
        column = app.query_one(ConversationColumn)
        assert lines(column) == []
        column.show([], "1")
        await pilot.pause()
        assert lines(column) == ["none saved yet"]
