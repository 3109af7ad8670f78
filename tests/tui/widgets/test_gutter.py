"""The transcript's gutter: glyphs, and the rows of the messages in sight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.app_driver import answers, finished, typed

from kvchat.conversations.conversation import Conversation
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.tui.state import UNFINISHED, Mark, mark, message_at, message_ranges
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.panels import Timeline
from kvchat.tui.widgets.transcript import Gutter, Transcript, shade


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
def test_the_glyph_tells_the_share_without_color(letter, share, glyph):
    assert shade(Mark(letter, share)) == glyph


async def test_messages_are_marked_where_they_stand_without_a_layout(running):
    async with running(size=(80, 20)) as (app, _pilot, until):  # the answer does not fit
        typed(app, "hello")
        await until(lambda: finished(app))
        gutter, transcript = app.chat.query_one(Gutter), app.chat.query_one(Transcript)
        question, answer = app.chat.query(Question).last(), answers(app)[-1]
        await until(lambda: question.message and answer.message)

        def beside_the_messages() -> list[str]:
            rows, top = [" "] * gutter.size.height, transcript.region.y
            for glyph, message in (("×", question), ("█", answer)):
                for y in range(max(message.region.y - top, 0), min(message.region.bottom - top, len(rows))):
                    rows[y] = glyph
            return rows

        def shown() -> list[str]:
            return [gutter.render_line(y).text for y in range(gutter.size.height)]

        def is_marked() -> bool:
            gutter.show({question.message: Mark("X", 0.0), answer.message: Mark("D", 1.0)}.get)
            return {"█", " "} <= set(shown()) and shown() == beside_the_messages()

        await until(is_marked)
        assert (gutter.region.width, gutter.region.x) == (1, transcript.region.x)
        transcript.scroll_home(animate=False)
        await until(lambda: transcript.scroll_y == 0 and "×" in shown() and shown() == beside_the_messages())
        size, drawn = transcript.virtual_size, list(gutter._rows)
        gutter.show({answer.message: Mark("D", 0.1)}.get)
        assert transcript.virtual_size == size
        assert gutter._rows != drawn
        snapshot = app.controller.state.snapshot
        app.chat.show_snapshot(replace(snapshot, total=0, ribbon="", attended=""))
        assert not any(gutter._rows)


async def test_another_size_leaves_no_holes_while_no_snapshot_comes(running):
    async with running(size=(80, 20)) as (app, pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app))
        gutter, answer = app.chat.query_one(Gutter), answers(app)[-1]
        await until(lambda: answer.message)
        gutter.show({answer.message: Mark("D", 1.0)}.get)
        for size in ((80, 40), (60, 24), (120, 50)):
            await pilot.resize_terminal(*size)
            top = app.chat.query_one(Transcript).region.y

            def rows(top=top):
                return range(max(answer.region.y - top, 0), min(answer.region.bottom - top, gutter.size.height))

            await until(lambda rows=rows: rows() and {gutter.render_line(y).text for y in rows()} == {"█"})


async def test_a_conversation_of_which_nothing_is_stored_has_no_figure_of_the_last(running):
    async with running(size=(120, 40)) as (app, _pilot, until):
        typed(app, "hello")
        await until(lambda: finished(app) and app.chat.query_one(Timeline).points)
        app.chat.show_snapshot(replace(app.controller.state.snapshot, total=0, ribbon="", attended=""))
        assert app.chat.query_one(Timeline).points == []


# ---- Messages and the tokens that stand for them: what is read of each


def talk() -> Conversation:
    conversation = Conversation("be brief")
    for text, begin, end in (("one", 20, 64), ("two", 90, 320)):
        conversation.ask(text)
        conversation.answer("answer", "eos", "", Stats(prompt_tokens=begin, total_tokens=end))
    return conversation


def snapshot(ribbon: str, attended: str, total: int) -> Snapshot:
    return Snapshot("streaming", {}, 1.0, total, 4096, 0, 0, ribbon=ribbon, attended=attended)


def test_ranges_follow_the_counts_of_the_answers():
    conversation = talk()
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


def test_the_message_of_a_token():
    conversation = talk()
    ranges = message_ranges(conversation.path, None, 400)
    one, first, two, second = ranges
    assert [message_at(ranges, token) for token in (0, 20, 63, 64, 319, 320)] == [one, first, first, two, second, None]


def test_marks_tell_state_and_share():
    conversation = talk()
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
    assert marked == [True, True, False, False], "what is not stored has no mark"
    assert mark(0, 64, snapshot("", "", 64)) is None
