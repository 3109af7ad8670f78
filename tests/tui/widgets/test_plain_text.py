"""A long plain text is shown in full by one widget and can be selected; code and lists in answers."""

import pytest
from rich.cells import cell_len
from support.app_driver import drawn, wait_for
from textual import highlight
from textual.app import App, ComposeResult
from textual.geometry import Offset, Size
from textual.selection import SELECT_ALL, Selection
from textual.widgets._markdown import MarkdownFence

from kvchat.tui.widgets.answer_body import CodeBlock, ItemList, ItemText, MarkdownPart
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


async def test_every_word_is_in_a_fitting_row():
    app = App[None]()
    async with app.run_test(size=SIZE) as pilot:
        for text in LONG.values():
            part = await shown(app, text)
            await pilot.pause()
            width = part.size.width
            assert part.size.height == part.get_content_height(SIZE, SIZE, width)
            rows = [part.render_line(y) for y in range(part.size.height)]
            assert all(row.cell_length == width for row in rows)
            assert "".join("".join(row.text for row in rows).split()) == "".join(text.split())
            await part.remove()


async def test_wrapping_keeps_words_and_indentation():
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


async def test_zero_width_draws_nothing():
    app = App[None]()
    async with app.run_test(size=SIZE) as pilot:
        part = await shown(app, "one two three")
        part.styles.padding = (0, 2)
        await pilot.resize_terminal(3, 22)
        await wait_for(lambda: part.size.width == 0)
        assert part.render_line(0).text == ""


async def test_a_selection_is_marked_and_copied():
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
        background = next(iter(plain)).style.bgcolor
        assert [segment.text for segment in marked if segment.style.bgcolor != background] == ["five six"]
        assert next(iter(marked)).style.meta["offset"] == (21, 0)


def test_the_content_width_is_the_longest_line():
    assert PlainText("one\nthree").get_content_width(SIZE, SIZE) == cell_len("three")
    assert PlainText().get_content_width(SIZE, SIZE) == 0


# ---- Code in answers is drawn at once: no language is guessed, and the slow ones are prepared


class Page(App[None]):
    def compose(self) -> ComposeResult:
        yield MarkdownPart({})


@pytest.mark.parametrize("text", ["```\nx = 1\n```\n", "    x = 1\n"])
async def test_code_languages_are_not_guessed(monkeypatch, text):
    guessed = []
    monkeypatch.setattr(highlight, "guess_language", lambda code, path: guessed.append(code) or "text")
    app = Page()
    async with app.run_test() as _:
        await app.query_one(MarkdownPart).show(text, is_closed=True, is_final=True)
        await wait_for(lambda: [fence._content.plain for fence in app.query(CodeBlock)] == ["x = 1"])
    assert not guessed


def test_named_languages_are_highlighted():
    assert len(CodeBlock.highlight("x = 1", "python").spans) > len(CodeBlock.highlight("x = 1", "").spans)


async def test_long_code_lines_are_fully_readable():
    app, words = Page(), [f"word{n}" for n in range(30)]
    async with app.run_test(size=(24, 40)) as _:
        await app.query_one(MarkdownPart).show(f"```\n{' '.join(words)}\n```\n", is_closed=True, is_final=True)
        await wait_for(lambda: all(word in drawn(app) for word in words))


# ---- Lists of Markdown: one widget for each item, with its rows indented after the bullet


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
}


async def draw(app: App[None], text: str) -> list[str]:
    part = app.query_one(MarkdownPart)
    await part.show(text, is_closed=True, is_final=True)
    items = list(part.query(ItemText))
    await wait_for(lambda: items and all(item.size.height for item in items))
    return [item.render_line(y).text.rstrip() for item in items for y in range(item.size.height)]


async def test_a_list_item_is_one_indented_widget():
    app = Page()
    async with app.run_test(size=(24, 80)) as _:
        for name, (text, expected) in LISTS.items():
            assert await draw(app, text) == expected, name
            assert {type(widget) for widget in app.query("MarkdownPart *")} == {ItemList, ItemText}
        rows = await draw(app, "".join(f"{'  ' * n}- {n}\n" for n in range(40)))
        assert [row.split()[-1] for row in rows] == [str(n) for n in range(40)]


async def test_blocks_in_items_are_indented_and_keep_styles():
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
