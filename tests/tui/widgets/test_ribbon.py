"""The ribbon maps stored tokens to columns; the gutter marks messages."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.app_driver import answers, ask, is_open, press, prompt, toasts
from textual.selection import SELECT_ALL
from textual.widgets import Static

from kvchat.conversations.conversation import Conversation
from kvchat.protocol.figures import RIBBON, Snapshot, Stats
from kvchat.protocol.messages import Sampling
from kvchat.tui.screens.help import HelpScreen
from kvchat.tui.state import UNFINISHED, ChatState, Mark, mark, message_ranges
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.panels import Timeline, legend
from kvchat.tui.widgets.ribbon import (
    CLASSES,
    GLYPHS,
    TICK,
    Ribbon,
    glyph,
    mean_shares,
    part_at,
    part_of,
    squeeze,
    tokens_of,
)
from kvchat.tui.widgets.transcript import Gutter, Transcript, shade
from kvchat.units import BARS


def test_every_state_has_a_color_and_distinct_glyphs():
    assert set(CLASSES) == set(RIBBON)
    assert len({*GLYPHS.values(), *BARS, TICK}) == len(GLYPHS) + len(BARS) + 1
    assert all(word in legend(True).plain for word in RIBBON.values())


def test_the_bar_height_is_the_share_read():
    assert "".join(glyph("D", share) for share in range(10)) == "▁▁▂▃▄▄▅▆▇█"
    assert [glyph(letter, 0) for letter in "RHFX"] == ["▲", "·", "~", "×"]
    assert (glyph("H", 2), glyph("R", 9)) == ("▂", "▲")


@pytest.mark.parametrize(
    ("digits", "width", "shares"), [("", 5, []), ("90", 5, [9, 0]), ("9900", 2, [9, 0]), ("90", 1, [4])]
)
def test_group_shares_are_means(digits, width, shares):
    assert mean_shares(digits, width) == shares


@pytest.mark.parametrize(
    ("cells", "width", "shown"),
    [("SDDW", 10, "SDDW"), ("SHHHHHHDHHHW", 3, "SHW"), ("HHHR" * 2, 2, "RR"), ("HHD" * 3, 3, "HHH"), ("", 5, "")],
)
def test_squeezing_keeps_the_majority_and_rare_states(cells, width, shown):
    assert squeeze(cells, width) == shown


@given(st.text("SWDRHX", min_size=1, max_size=300), st.integers(1, 120))
def test_squeezed_ribbons_fit_and_lose_no_recall(cells, width):
    shown = squeeze(cells, width)
    assert len(shown) == min(len(cells), width)
    assert ("R" in shown) == ("R" in cells)


@given(st.integers(1, 1024), st.integers(1, 200), st.integers(1, 64))
def test_parts_cover_all_tokens_without_gap_or_overlap(cells, width, cell_tokens):
    total = cells * cell_tokens - cell_tokens // 2
    ranges = [tokens_of(column, cell_tokens, cells, width, total) for column in range(min(cells, width))]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert tokens_of(0, 32, 0, 80, 0) == (0, 0), "nothing is stored"


def test_a_token_is_in_the_part_that_shows_it():
    for cells, width in ((10, 40), (1024, 60), (60, 60)):
        for position in range(0, cells * 32, 37):
            part = part_of(position, 32, cells, width)
            start, end = tokens_of(part, 32, cells, width, cells * 32)
            assert start - 32 <= position < end + 32


@given(cells=st.integers(1, 300), width=st.integers(1, 200))
def test_a_click_finds_the_part_under_it(cells, width):
    parts = min(cells, width)
    edges = [part * width // parts for part in range(parts + 1)]
    for column in range(width):
        part = part_at(column, parts, width)
        assert edges[part] <= column < edges[part + 1]


async def test_enter_or_a_click_selects_the_parts_message(running):
    async with running() as (app, pilot, until):
        await ask(app, "hello there", "and now")
        ribbon, transcript = app.chat.query_one(Ribbon), app.chat.query_one(Transcript)
        await until(lambda: ribbon.render_line(0).text.startswith(" KV ███"))
        assert ribbon.render_line(0).text.count("█") > 100, "few tokens fill the whole width"
        path = app.controller.state.conversation.path
        await until(lambda: ribbon.snapshot.total == path[3].stats.total_tokens)
        ribbon.focus()
        press(app, "enter")
        await until(lambda: transcript.chosen == path[1].id and transcript.has_focus)
        await until(lambda: ribbon.region.height == 1 and app.chat.get_widget_at(100, ribbon.region.y)[0] is ribbon)
        await pilot.click(Ribbon, offset=(100, 0))
        await until(lambda: transcript.chosen == path[3].id and transcript.has_focus)
        assert not ribbon.has_focus
        app.chat.post_message(Ribbon.Picked(7000))
        await until(lambda: "Token 7,000 belongs to no message" in toasts(app))


@pytest.mark.parametrize("size", [(44, 14), (80, 24)])
async def test_a_focused_ribbon_shows_a_legend(running, monkeypatch, size):
    monkeypatch.setenv("FAKE_GPU", "1")
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running(size=size) as (app, _pilot, until):
        await ask(app, "alpha beta", mode="streaming")
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: ribbon.size.height == 3)
        await until(lambda: ribbon.render_line(2).text.startswith(" █ sink  █ window  × out of reach"))
        assert ("all heads" in ribbon.render_line(2).text) == (size[0] >= 80)


async def test_without_a_gpu_no_device_is_mentioned(running, monkeypatch):
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running(size=(200, 60)) as (app, _pilot, until):
        await ask(app, "alpha beta")
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: "ready to read, read by all heads" in ribbon.render_line(1).text)
        assert "█ ready to read" in ribbon.render_line(2).text
        shown = str(app.chat.query_one("#legend", Static).content)
        assert "stored only" in shown
        assert "device" not in shown
        assert "host" not in shown
        press(app, "f1")
        await until(lambda: is_open(app, HelpScreen))
        assert str(app.screen.query(Static).last().content) == shown


async def test_the_ribbon_shows_the_text_under_its_cursor(running, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    monkeypatch.setenv("FAKE_REPEAT", "100")
    async with running() as (app, _pilot, until):
        await ask(app, "alpha beta")
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: ribbon.page_text.startswith("alpha beta alpha"))
        press(app, "right")
        await until(lambda: ribbon.cursor == 1 and ribbon.page_text and ribbon.size.height == 3)
        await until(lambda: "32–63 on the device, read by all heads" in ribbon.render_line(1).text)
        press(app, "escape")
        await until(lambda: prompt(app).has_focus)


# ---- The transcript's gutter: glyphs in the rows of the messages in view


@pytest.mark.parametrize(
    ("letter", "share", "glyph"),
    [
        ("D", 1.0, "█"),
        ("D", 0.5, "▓"),
        ("H", 0.01, "░"),
        ("H", 0.0, "·"),
        ("X", 0.0, "×"),
        ("F", 0.0, "~"),
        ("?", 0, "·"),
    ],
)
def test_glyphs_show_the_share_without_color(letter, share, glyph):
    assert shade(Mark(letter, share)) == glyph


async def test_gutter_marks_align_with_messages_at_every_size(running):
    async with running(size=(80, 20)) as (app, pilot, until):  # the answer does not fit
        await ask(app, "hello")
        gutter, transcript = app.chat.query_one(Gutter), app.chat.query_one(Transcript)
        question, answer = app.chat.query(Question).last(), answers(app)[-1]
        await until(lambda: question.message and answer.message)
        queued = await app.chat.add_question("next", queued=True)  # not stored, and without an id yet
        await until(lambda: queued.region.height and transcript.is_vertical_scroll_end)

        def expected_rows():
            rows, top = [" "] * gutter.size.height, transcript.region.y
            for glyph, message in (("×", question), ("█", answer)):
                for y in range(max(message.region.y - top, 0), min(message.region.bottom - top, len(rows))):
                    rows[y] = glyph
            return rows

        def shown():
            return [gutter.render_line(y).text for y in range(gutter.size.height)]

        def is_marked():
            read = Mark("D", 1.0)
            gutter.show({question.message: Mark("X", 0.0), answer.message: read, UNFINISHED: read}.get)
            return {"█", " "} <= set(shown()) and shown() == expected_rows()

        await until(is_marked)
        assert (gutter.region.width, gutter.region.x) == (1, transcript.region.x)
        assert gutter.allow_select  # a selection may begin at the left edge
        assert gutter.get_selection(SELECT_ALL) is None  # but its marks are not copied
        transcript.scroll_home(animate=False)
        await until(lambda: transcript.scroll_y == 0 and "×" in shown() and shown() == expected_rows())
        size, drawn = transcript.virtual_size, list(gutter._rows)
        gutter.show({answer.message: Mark("D", 0.1)}.get)
        assert transcript.virtual_size == size
        assert gutter._rows != drawn
        gutter.show({answer.message: Mark("D", 1.0)}.get)
        for size in ((80, 40), (60, 24), (120, 40)):  # no gaps even without a new snapshot
            await pilot.resize_terminal(*size)
            top = transcript.region.y

            def rows(top=top):
                return range(max(answer.region.y - top, 0), min(answer.region.bottom - top, gutter.size.height))

            await until(lambda rows=rows: rows() and {gutter.render_line(y).text for y in rows()} == {"█"})
        await until(lambda: app.chat.query_one(Timeline).points)
        app.chat.show_snapshot(replace(app.controller.state.snapshot, total=0, ribbon="", attended=""))
        assert not any(gutter._rows)
        assert app.chat.query_one(Timeline).points == []


# ---- The stored tokens of messages, and how much of them is read


def make_conversation() -> Conversation:
    conversation = Conversation("be brief")
    for text, begin, end in (("one", 20, 64), ("two", 90, 320)):
        conversation.ask(text)
        conversation.answer("answer", "eos", "", Stats(prompt_tokens=begin, total_tokens=end))
    return conversation


def snapshot(ribbon: str, attended: str, total: int) -> Snapshot:
    return Snapshot("streaming", {}, 1.0, total, 4096, 0, 0, ribbon=ribbon, attended=attended)


def test_message_ranges_follow_the_answers_counts():
    conversation = make_conversation()
    one, first, two, second = (message.id for message in conversation.path)
    expected = {one: (0, 20), first: (20, 64), two: (64, 90), second: (90, 320)}
    assert message_ranges(conversation.path, None, 400) == expected
    three = conversation.ask("three").id
    assert message_ranges(conversation.path, None, 400) == expected
    running = message_ranges(conversation.path, 350, 400)
    assert running == {**expected, three: (320, 350), UNFINISHED: (350, 400)}
    reading = message_ranges(conversation.path, 350, 330)
    assert reading[three] == (320, 330)
    conversation.answer("cut off", "cut off")
    assert message_ranges(conversation.path, None, 400) == expected


def test_a_token_maps_to_its_message():
    conversation = make_conversation()
    ranges = message_ranges(conversation.path, None, 400)
    one, first, two, second = ranges
    state = ChatState(conversation, Sampling(), "full", snapshot=snapshot("S" * 13, "9" * 13, 400))
    assert [state.message_at(at) for at in (0, 20, 63, 64, 319, 320)] == [one, first, first, two, second, None]


def test_marks_show_state_and_share():
    conversation = make_conversation()
    one, first, two, second = (message.id for message in conversation.path)
    ranges, read = message_ranges(conversation.path, None, 320), snapshot("SXXXXXWWWW", "9000009999", 320)
    assert {id: mark(*tokens, read) for id, tokens in ranges.items()} == {
        one: Mark("S", 1.0),
        first: Mark("S", 0.5),
        two: Mark("X", 0.0),
        second: Mark("X", 0.5),
    }
    assert mark(*ranges[first], read, pinned=True) == Mark("P", 0.5)
    stored = snapshot("SX", "90", 64)
    marked = [mark(*tokens, stored) is not None for tokens in message_ranges(conversation.path, None, 64).values()]
    assert marked == [True, True, False, False], "messages that are not stored have no mark"
    assert mark(0, 64, snapshot("", "", 64)) is None
