"""A long conversation is shown by few widgets, with all its messages; the welcome screen."""

from collections.abc import Sequence

import pytest
from support.app_driver import ask, drawn, is_finished, press, prompt, submit, texts, wait_for

from kvchat.conversations.conversation import Message
from kvchat.paths import BUNDLED
from kvchat.tui.app import KvchatApp
from kvchat.tui.screens.compare import NeedleScreen
from kvchat.tui.state import Footed
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.transcript import CHAPTER_LENGTH, NEWEST, Chapter, Transcript, message_widgets
from kvchat.tui.widgets.welcome import ABOUT_BUNDLED, ABOUT_NEEDLE, EXAMPLES, NEEDLE, Welcome, example

MANY = 120


def make_messages(count: int = MANY) -> list[Footed]:
    """Questions ``q0``, ``q2``… and answers ``a1``, ``a3``…, whose texts begin with their ids."""
    roles = ("user", "assistant")
    ids = [f"{'qa'[number % 2]}{number}" for number in range(count)]
    return [
        (Message(id=id, parent=None, role=roles[number % 2], text=f"{id}. " + "word " * 60, ending="eos"), "footer")
        for number, id in enumerate(ids)
    ]


async def opened(app: KvchatApp, messages: Sequence[Footed] = ()) -> Transcript:
    """Show messages and wait until the last is drawn."""
    await app.chat.show_messages(messages or make_messages(), None)
    transcript = app.chat.query_one(Transcript)
    await wait_for(lambda: f"a{MANY - 1}." in drawn(app) and transcript.is_vertical_scroll_end)
    return transcript


def ids(transcript: Transcript) -> list[str]:
    return [message.message for message, _ in transcript.message_regions()]


def chapters(transcript: Transcript) -> list[Chapter]:
    return list(transcript.query_children(Chapter))


def test_only_the_newest_messages_have_their_own_widgets():
    assert {type(widget) for widget in message_widgets(make_messages(NEWEST + CHAPTER_LENGTH))} == {Question, Answer}
    first, second, *newest = message_widgets(make_messages(NEWEST + CHAPTER_LENGTH + 1))
    assert [type(widget) for widget in (first, second)] == [Chapter, Chapter]
    assert ([message.id for message, _ in first.messages], len(second.messages), len(newest)) == (
        ["q0"],
        CHAPTER_LENGTH,
        NEWEST,
    )


async def test_chapters_unfold_when_scrolled_or_jumped_to(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        transcript = await opened(app)
        first, *_ = chapters(transcript)
        assert first.folded
        assert len(ids(transcript)) <= NEWEST + 2 * CHAPTER_LENGTH
        assert await transcript.go_to("q20")
        other = next(chapter for chapter in chapters(transcript) if not chapter.has("q20"))
        transcript.on_chapter_grew(Chapter.Grew(other, 0))  # meanwhile
        await until(lambda: transcript.chosen == "q20" and "q20." in drawn(app))
        assert not await transcript.go_to("elsewhere")
        transcript.choose(None)
        app.chat.show_footer(make_messages()[0][0], "pinned")
        transcript.scroll_home(animate=False)
        await until(lambda: "❯ q0." in drawn(app) and ids(transcript)[:2] == ["q0", "a1"])
        await until(lambda: "pinned" in drawn(app) and transcript.query_children(Chapter).last().folded)
        press(app, "ctrl+end")
        await until(lambda: f"a{MANY - 1}." in drawn(app) and first.folded)
        assert await transcript.go_to(f"q{MANY - 2}")
        transcript.choose(None)
        await transcript.settle()
        assert transcript.chosen is None, "an earlier jump must not choose its message again"
        await app.chat.show_messages([(Message(id="other", parent=None, role="user", text="another"), "")], "a21")
        await until(lambda: {"another", "a21."} <= set(drawn(app).split()))
        await until(lambda: ids(transcript)[-2:] == ["a21", "other"])
        assert texts(app.chat.query(Question))[-1].startswith("another")


async def test_the_visible_message_stays_when_a_chapter_above_resizes(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        long = Message(id="q100", parent=None, role="user", text="line\n" * 60)  # shortened in its own widget
        transcript = await opened(app, [*make_messages()[:100], (long, ""), *make_messages()[101:]])
        last, read = chapters(transcript)[-1], transcript.query_children(Question).first()
        height, is_drawn = last.size.height, last.styles.height.is_auto  # it may have changed its height before
        transcript.scroll_to_widget(read, animate=False, top=True, immediate=True)
        place = read.virtual_region.y - transcript.scroll_y
        await until(lambda: last.styles.height.is_auto and (is_drawn or last.size.height < height - 40))
        await until(lambda: read.virtual_region.y - transcript.scroll_y == place)


async def test_a_selected_question_is_fully_readable(running):
    async with running(size=(80, 24), ready=False) as (app, pilot, until):
        await app.chat.show_messages([(Message(id="q", parent=None, role="user", text="xyz " * 60), "")], None)
        await until(lambda: drawn(app).count("xyz") == 60)
        first, *wrapped = [line for line in drawn(app).splitlines() if "xyz" in line]
        assert "❯ xyz" in first
        assert {line.find("xyz") for line in wrapped} == {first.find("xyz")}, "they align with the first word"
        app.chat.query_one(Transcript).choose(app.chat.query_one(Question))
        await pilot.pause()
        assert drawn(app).count("xyz") == 60


async def test_a_jump_succeeds_if_its_chapter_grows_late(running, monkeypatch):
    post, settle, late, settled = Chapter.post_message, Transcript.settle, [], []

    def hold_growth_back(chapter, message):
        return late.append(message) if isinstance(message, Chapter.Grew) else post(chapter, message)

    async def settle_and_record(transcript):
        await settle(transcript)
        settled.append(transcript._target)

    async with running(size=(80, 24)) as (app, _pilot, until):
        transcript = await opened(app)
        monkeypatch.setattr(Chapter, "post_message", hold_growth_back)
        monkeypatch.setattr(Transcript, "settle", settle_and_record)
        assert await transcript.go_to("q20")
        await until(lambda: late and transcript.chosen == "q20" and (settled[-1] is None or len(settled) > 10))
        monkeypatch.setattr(Chapter, "post_message", post)
        count = len(settled)
        for event in late:
            transcript.on_chapter_grew(Chapter.Grew(event.chapter, 60))  # by more than the height of the screen
        await until(lambda: len(settled) > count and settled[-1] is None)
        await until(lambda: transcript.chosen == "q20" and "q20." in drawn(app))


# ---- The welcome screen: examples chosen by key and by mouse, at every size


def test_numbers_and_empty_input_choose_examples():
    assert [example(text, BUNDLED) for text in ("", "1", "2", "3")] == [EXAMPLES[True][n] for n in (0, 0, 1, 2)]
    assert [example(text, "other") for text in ("3", "4", "5", " ", "1 a")] == [EXAMPLES[False][2], NEEDLE, *[None] * 3]


def test_the_welcome_screen_of_a_recording_offers_no_questions():
    text = str(Welcome(BUNDLED, {"replay.pause": "F12"}.get, "demo.jsonl")._content())
    assert text.startswith("demo.jsonl")
    assert "F12 pauses it" in text
    assert not any(question in text for question in (*EXAMPLES[True], ABOUT_NEEDLE, ABOUT_BUNDLED))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_welcome_screen_disappears_after_the_first_question(running, size):
    async with running(size=size) as (app, _pilot, until):
        await until(lambda: app.chat.query(Welcome))
        welcome, transcript = app.chat.query_one(Welcome), app.chat.query_one(Transcript)
        shown = str(welcome.content)
        assert all(text in shown for text in (ABOUT_BUNDLED, *EXAMPLES[True], ABOUT_NEEDLE, "F6 changes how much"))
        await until(lambda: 0 < welcome.region.height <= transcript.region.height)
        assert ("what the figures mean" in shown) == (size[1] >= 40)
        press(app, "enter")
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == EXAMPLES[True][0]
        assert not app.chat.query(Welcome)
        await ask(app, "2")
        assert app.controller.state.conversation.turns[2].content == "2"


async def test_a_number_or_a_click_asks_an_example(running):
    async with running() as (app, pilot, until):
        submit(app, "4")
        await until(lambda: isinstance(app.screen, NeedleScreen) and app.screen.shown.is_over)
        press(app, "escape")
        await until(lambda: app.screen is app.chat)
        assert app.chat.query(Welcome)
        await ask(app, "3")
        assert app.controller.state.conversation.turns[0].content == EXAMPLES[True][2]
        assert not prompt(app).text
        await app.controller.new()
        await until(lambda: app.chat.query(Welcome))
        lines = str(app.chat.query_one(Welcome).content)
        welcome = app.chat.query_one(Welcome)
        await until(lambda: welcome.region.height)
        row = next(y for y in range(welcome.region.height) if EXAMPLES[True][1] in welcome.render_line(y).text)
        assert EXAMPLES[True][1] in lines
        line = welcome.region.y + row  # its row on the screen once it is drawn
        await until(lambda: EXAMPLES[True][1] in drawn(app).splitlines()[line])
        await pilot.click(Welcome, offset=(8, row))
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == EXAMPLES[True][1]
