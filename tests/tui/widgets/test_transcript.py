"""Which answers are collapsed, the number of new lines below, and answers as they are drawn."""

import asyncio
from dataclasses import replace

from support.app_driver import answers, ask, is_finished, notes, press, submit, texts
from textual.widgets import Markdown, Static

from kvchat.conversations.conversation import Message, ModeChange
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Finished, Switched, Text
from kvchat.tui.state import Phase
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.answer_body import AnswerBody
from kvchat.tui.widgets.transcript import LIVE_WIDGETS, NewLines, Transcript, live_count


def weighted(*weights: int) -> list[Answer]:
    made = [Answer() for _ in weights]
    for answer, weight in zip(made, weights, strict=True):
        answer.weight = weight
    return made


def test_at_least_two_answers_stay_expanded():
    assert live_count(weighted(1, 1)) == 2
    assert live_count(weighted(*[LIVE_WIDGETS // 4] * 10)) == 4
    assert live_count(weighted(*[LIVE_WIDGETS * 2] * 10)) == 2


async def test_new_lines_are_counted_while_scrolled_up(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        await ask(app, "hello")
        submit(app, "slow")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        press(app, "pageup")
        chip = app.chat.query_one(NewLines)
        await until(lambda: chip.display)
        transcript = app.chat.query_one(Transcript)
        await until(lambda: transcript.scroll_y == transcript.scroll_target_y < transcript.max_scroll_y)
        place, before = transcript.scroll_y, texts([chip])
        await until(lambda: texts([chip]) != before)
        assert transcript.scroll_y == place
        press(app, "ctrl+end")
        await until(lambda: not chip.display)


async def test_notes_before_the_first_word_go_above_the_answer(running):
    async with running(ready=False) as (app, _pilot, until):
        await app.chat.show_messages([], None)
        await app.chat.add_question("asked", queued=False)
        answer = await app.chat.add_answer()
        queued = await app.chat.add_question("next", queued=True)
        shown = app.chat.query_one(Transcript).children
        app.chat.add_note("restored")
        await until(lambda: "restored" in notes(app))
        assert list(shown)[-2:] == [answer, queued]
        answer.feed("A word.")
        app.chat.add_note("withdrawn")
        await until(lambda: "withdrawn" in notes(app))
        assert [shown.index(answer), shown.index(queued)] == [len(shown) - 3, len(shown) - 1]


async def test_old_answers_collapse_and_expand_when_read(running, monkeypatch):
    monkeypatch.setattr("kvchat.tui.widgets.transcript.LIVE_WIDGETS", 1)
    async with running(size=(80, 24)) as (app, _pilot, until):
        for number in range(1, 9):
            await app.controller.ask("hello")
            await until(lambda number=number: is_finished(app, number))
            await until(lambda: answers(app)[-1].query_one(".receipt").region.height)  # it is laid out completely
        first, transcript = answers(app)[0], app.chat.query_one(Transcript)
        await until(lambda: first.collapsed)
        height = first.size.height
        assert not answers(app)[-1].collapsed
        transcript.scroll_home(animate=False)
        heights = set()  # also while it expands: nothing below it may move

        def is_expanded():
            heights.add(first.size.height)
            return first.styles.height.is_auto and any(fence.region.height for fence in first.query("MarkdownFence"))

        await until(is_expanded)
        laid_out = asyncio.Event()
        first.call_after_refresh(laid_out.set)
        await until(laid_out.is_set)
        assert heights | {first.size.height} == {height}
        assert not first.collapsed


# ---- Answers on the screen: nothing of their text is dropped, thoughts are folded


LINE = ModeChange(3, "full -> sync", 5, "sync")
HTML = "<think>\nOne.\n\nTwo.\n</think>\n\n<div>three</div>\n\nfour <b>five</b>\n\n<details>\nsix\n</details>\n"


def drawn(app) -> str:
    """All text of the Markdown blocks of the first answer."""
    return "\n".join(str(block.render()) for block in answers(app)[0].query("MarkdownBlock"))


async def test_html_is_text_and_thoughts_are_folded(running):
    async with running() as (app, _pilot, until):
        app.controller.state.enter_phase(Phase.LOADING)
        await app.controller.ask("hi")
        app.controller.client.send = lambda command: None
        await app.controller.answers.ready()
        answer = answers(app)[0]
        for piece in (HTML[:12], HTML[12:40], HTML[40:]):
            await app.controller.handle(Text(piece, 1))
            await until(lambda: not answer._paced._is_requested)
        await until(lambda: "six" in drawn(app))
        await app.controller.handle(Finished("eos", HTML, Stats(generated_tokens=1)))
        await until(lambda: answer.finished and "six" in drawn(app))
        for word in ("<div>three</div>", "<b>five</b>", "<details>"):
            await until(lambda word=word: word in drawn(app))
        assert "One." not in answer.query_one(Markdown).source
        assert texts(answer.query(".thought").results(Static)) == ["▸ thought, 2 words"]
        whole = answer.query_one(".thoughts", Static)
        await until(lambda: not whole.display)
        press(app, "ctrl+t")
        await until(lambda: whole.region.height)
        assert "One." in str(whole.content)
        await app.chat.run_command("/copy")
        assert app.clipboard.startswith("<div>three")


async def test_a_thought_begun_by_the_prompt_is_folded(running):
    async with running() as (app, _pilot, until):
        answer = await app.chat.add_answer()
        answer.thought = "</think>"
        answer.feed("Let me see. Yes.</think>\n\nHello.")
        await until(lambda: "Hello." in drawn(app) and "Let me see" not in drawn(app))
        assert texts(answer.query(".thought").results(Static)) == ["▸ thought, 4 words"]
        answer = await app.chat.add_answer()
        answer.feed("Hello.")
        answer.display = False
        await until(lambda: not answer.size.height)
        await answer.set_collapsed(True)
        assert not answer.collapsed, "it was never laid out"


async def test_switch_marks_stay_in_a_reopened_or_resumed_answer(running):
    message = Message(parent=None, role="assistant", text="one two", ending="stopped", switch_lines=(LINE,))
    async with running() as (app, _pilot, until):
        past = Answer.past(message, "")
        assert [shown.text for shown in past.compose()] == ["one ┃ two"]
        await app.chat._transcript.add(past)
        await until(lambda: past.size.height)
        await past.set_collapsed(False)
        await until(lambda: "one ┃ two" in drawn(app))
        await until(lambda: texts(past.query(".switches").results(Static)) == ["┃ full -> sync"])
        answer = await app.chat.add_answer()
        answer.resume(message)
        answer.feed(" three")
        mark = answer.mark(Switched("sync", "full", {}, 9, 0, 0.0), None)
        answer.feed(" four.")
        lines = (LINE, ModeChange(mark.chars, mark.line))
        text = "one two three four."
        expected = "one ┃¹ two three ┃² four."
        await until(lambda: answer.query_one(AnswerBody) and answer._parts()[1] == expected)
        await answer.finish(replace(message, text=text, switch_lines=lines), "")
        assert answer._parts()[1] == expected
        footnotes = texts(answer.query(".switches").results(Static))
        assert footnotes == [f"┃¹ full -> sync\n┃² {mark.line}"]


async def test_an_answer_opened_during_mounting_is_composed_once(running):
    async with running() as (app, _pilot, until):
        past = Answer.past(Message(parent=None, role="assistant", text="one", ending="eos"), "3 tok")
        mounted = app.chat._transcript.mount(past)
        await app.chat._transcript.settle()
        await mounted
        await until(lambda: past.size.height)
        await app.chat._transcript.settle()
        assert (past.collapsed, texts(past.query(".receipt").results(Static))) == (False, ["3 tok"])


def test_a_past_answer_starts_collapsed_with_its_weight():
    message = Message(parent=None, role="assistant", text="a\nb\nc", ending="stopped")
    answer = Answer.past(message, "3 tok")
    assert (answer.collapsed, answer.finished, answer.weight, answer.text) == (True, True, 6, "a\nb\nc")
    assert answer.has_class("stopped")
    assert not Answer.past(Message(parent=None, role="assistant", text="", ending="eos"), "").has_class("stopped")
