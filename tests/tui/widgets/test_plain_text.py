"""A long plain text: one widget of as many rows as it needs, all of it shown, and to be selected."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from support.app_driver import wait_for
from textual.app import App
from textual.geometry import Offset, Size
from textual.selection import Selection

from kvchat.tui.widgets.base import PlainText

LONG = {
    "lines": "".join(f"- item {n}\n" for n in range(1500)),
    "words": "word " * 20_000,
    "no space": "x" * 20_000,
    "mixed": "short\n\n    indented words that go on and on for more than one row of it\n\tx = 1\n" * 50,
    "wide": "漢字かな混じり文 and some Latin words between them " * 100,
    "accents": "Käse für Zoë, e\u0301 combined and \U0001f468\u200d\U0001f469\u200d\U0001f467 as well. " * 100,
}
SIZE = Size(80, 24)


async def shown(app: App[None], text: str) -> PlainText:
    part = PlainText()
    await app.screen.mount(part)
    part.show(text)
    await app.animator.wait_until_complete()
    return part


@pytest.mark.parametrize("name", LONG)
async def test_every_word_is_in_a_row_that_fits(name):
    app = App[None]()
    async with app.run_test(size=SIZE) as pilot:
        part = await shown(app, LONG[name])
        await pilot.pause()
        width = part.size.width
        assert part.size.height == part.get_content_height(SIZE, SIZE, width)
        rows = [part.render_line(y) for y in range(part.size.height)]
        assert all(row.cell_length == width for row in rows)
        assert "".join("".join(row.text for row in rows).split()) == "".join(LONG[name].split())


async def test_words_stay_whole_and_indentation_stays():
    app = App[None]()
    async with app.run_test(size=(20, 24)) as pilot:
        part = await shown(app, "  one two three four five six\nend")
        await pilot.pause()
        width = part.size.width
        rows = [part.render_line(y).text.rstrip() for y in range(part.size.height)]
        assert rows == ["  one two three four", "five six", "end"]
        assert width == 20
        part.show("other")
        await pilot.pause()
        assert (part.size.height, part.render_line(0).text.rstrip()) == (1, "other")


async def test_without_a_column_for_it_nothing_is_drawn():
    app = App[None]()
    async with app.run_test(size=SIZE) as pilot:
        part = await shown(app, "one two three")
        part.styles.padding = (0, 2)
        await pilot.resize_terminal(3, 22)
        await wait_for(lambda: part.size.width == 0)
        assert part.render_line(0).text == ""


async def test_what_is_selected_is_marked_and_copied():
    app = App[None]()
    async with app.run_test(size=(20, 24)) as pilot:
        part = await shown(app, "  one two three four five six\nend")
        await pilot.pause()
        selection = Selection(Offset(6, 0), Offset(29, 0))
        assert part.get_selection(selection) == ("two three four five six", "\n")
        plain = part.render_line(1)
        app.screen.selections = {part: selection}
        await pilot.pause()
        marked = part.render_line(1)
        assert marked.text == plain.text
        ground = next(iter(plain)).style.bgcolor
        assert [segment.text for segment in marked if segment.style.bgcolor != ground] == ["five six"]
        assert next(iter(marked)).style.meta["offset"] == (21, 0)


def test_the_longest_line_is_its_width():
    assert PlainText("one\nthree").get_content_width(SIZE, SIZE) == cell_len("three")
    assert PlainText().get_content_width(SIZE, SIZE) == 0
