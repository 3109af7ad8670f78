"""Lists of Markdown: one widget an item, each row behind its bullet."""

from __future__ import annotations

import pytest
from support.app_driver import wait_for
from textual.app import App, ComposeResult
from textual.geometry import Offset
from textual.selection import SELECT_ALL, Selection
from textual.widgets._markdown import MarkdownFence

from kvchat.tui.widgets.answer_body import ItemList, ItemText, MarkdownPart

LISTS = {
    "bullets": ("- one\n- two\n", ["• one", "• two"]),
    "numbers": ("2. Paris\n14. Rome\n", ["  2. Paris", " 14. Rome"]),
    "lazy numbers": ("9. nine\n9. ten\n", ["  9. nine", " 10. ten"]),
    "other marks": ("2) Paris\n3) Rome\n", [" 2) Paris", " 3) Rome"]),
    "nested": ("- a\n  - b\n    1. c\n- d\n", ["• a", "  ▪ b", "     1. c", "• d"]),
    "two paragraphs": ("- a\n\n  b\n", ["• a", "  b"]),
    "no words": ("-\n- b\n", ["•", "• b"]),
    "in one line": ("- - a\n", ["•", "  ▪ a"]),
    "wrapped": ("- one two three four five six seven\n", ["• one two three four", "  five six seven"]),
    "deep": ("".join(f"{'  ' * n}- {n}\n" for n in range(40)), None),
}


class Page(App[None]):
    def compose(self) -> ComposeResult:
        yield MarkdownPart({})


async def draw(app: App[None], text: str) -> list[str]:
    part = app.query_one(MarkdownPart)
    await part.show(text, is_closed=True, is_final=True)
    items = list(part.query(ItemText))
    await wait_for(lambda: items and all(item.size.height for item in items))
    return [item.render_line(y).text.rstrip() for item in items for y in range(item.size.height)]


@pytest.mark.parametrize("name", LISTS)
async def test_an_item_is_one_widget_and_its_rows_are_behind_its_bullet(name):
    text, expected = LISTS[name]
    app = Page()
    async with app.run_test(size=(24, 80)) as _:
        rows = await draw(app, text)
        if expected is None:
            assert [row.split()[-1] for row in rows] == [str(n) for n in range(40)]
        else:
            assert rows == expected
        assert {type(widget) for widget in app.query("MarkdownPart *")} == {ItemList, ItemText}


async def test_other_blocks_of_an_item_are_indented_and_words_keep_their_style():
    app = Page()
    async with app.run_test(size=(40, 40)) as _:
        rows = await draw(app, "1. Do **this**:\n\n   ```py\n   x = 1\n   ```\n\n   and that.\n")
        assert rows == [" 1. Do this:", "    and that."]
        fence = app.query_one(MarkdownFence)
        assert fence.region.x == app.query(ItemText).first().region.x + 4
        styles = {segment.text: segment.style.bold for segment in app.query(ItemText).first().render_line(0)}
        assert styles["this"] is True
        assert not styles["Do "]


async def test_an_item_is_selected_with_its_bullet():
    app = Page()
    async with app.run_test(size=(40, 40)) as _:
        await draw(app, "- some words\n")
        item = app.query_one(ItemText)
        assert item.get_selection(SELECT_ALL) == ("• some words", "\n")
        assert item.get_selection(Selection(Offset(5, 0), None)) == ("words", "\n")
