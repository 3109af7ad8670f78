"""The chat screen, driven by keys with the fake engine."""

import asyncio
import re
from dataclasses import replace

from support.app_driver import (
    answers,
    ask,
    focus,
    is_finished,
    notes,
    press,
    prompt,
    receipts,
    submit,
    texts,
    toasts,
    wait_for,
)
from textual.widgets import Markdown, Static

from kvchat.tui.controller import ChatController
from kvchat.tui.state import Phase
from kvchat.tui.widgets.answer import Answer
from kvchat.tui.widgets.bars import KeyHints, ModeBar, StatusBar
from kvchat.tui.widgets.composer import FOLD_LINES, Prompt
from kvchat.tui.widgets.messages import Note, Question, SwitchNote
from kvchat.tui.widgets.panels import DetailColumn, KvColumn, LabeledRows, Timeline
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.transcript import Transcript
from kvchat.tui.widgets.welcome import Welcome


async def test_a_question_is_answered_with_markdown_and_a_receipt(running):
    async with running() as (app, _pilot, until):
        await until(lambda: app.chat.query(Welcome))
        press(app, "space", "enter")
        await until(lambda: "nothing to send" in toasts(app))
        assert not app.chat.query(Question)
        prompt(app).load_text("copy me")
        prompt(app).select_all()
        press(app, "ctrl+c")
        await until(lambda: app.clipboard == "copy me")
        assert prompt(app).text == "copy me"
        await ask(app, "hello there")
        answer = answers(app)[0]
        assert "| 2     |    30.23 |" in answer.query_one(Markdown).source
        await until(lambda: answer.query("MarkdownFence") and answer.query("MarkdownTable"))
        assert answer.receipt.startswith("58 tok · ")
        assert "first token 0.41 s · full · read 100 % of 60" in answer.receipt
        assert texts(app.chat.query(Question)) == ["hello there"]
        assert not app.chat.query(Welcome)
        assert [turn.role for turn in app.controller.state.conversation.turns] == ["user", "assistant"]
        submit(app, "/unload")
        await until(lambda: app.controller.state.phase is Phase.DOWN and app.controller.state.snapshot is None)
        assert app.chat.query_one(StatusBar).render().plain == ""
        assert dict(app.chat.query_one("#memory-rows", LabeledRows).rows)["weights"] == "–"


async def test_the_command_line_question_is_sent_when_ready(running, config):
    prompted = replace(config, prompt="hello", database=config.log_file.with_name("chats.db"))
    async with running(prompted) as (app, _, until):
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == "hello"
        assert prompt(app).text == ""
    async with running(replace(prompted, prompt="/mode streaming", resume=True)) as (app, _, until):
        await until(lambda: app.controller.state.mode == "streaming")
        assert len(app.controller.state.conversation.turns) == 2
    async with running(replace(prompted, prompt="@./none.txt", resume=True)) as (app, _, until):
        await until(lambda: "There is no file" in toasts(app))
        assert prompt(app).text == "@./none.txt", "an invalid prompt stays for correction"
    long = "a line\n" * FOLD_LINES + "and its end\tis here"
    async with running(replace(prompted, prompt=long)) as (app, _, until):
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == long


async def test_the_command_line_question_is_sent_only_once(running, config, monkeypatch):
    is_opened = asyncio.Event()

    async def open_slowly(controller, resume=False):
        await wait_for(lambda: len(controller.state.conversation.turns) == 2)
        is_opened.set()

    monkeypatch.setattr(ChatController, "open_archive", open_slowly)
    async with running(replace(config, prompt="hello"), ready=False) as (app, pilot, until):
        press(app, "enter")
        await until(is_opened.is_set)
        await pilot.pause(0.1)
        assert [turn.role for turn in app.controller.state.conversation.turns] == ["user", "assistant"]
        assert "nothing to send" not in toasts(app)


async def test_withdrawn_text_is_struck_and_not_part_of_the_answer(running):
    async with running() as (app, _pilot, until):
        await ask(app, "waver")
        await until(lambda: "withdrawn" in "".join(notes(app)))
        struck = next(note.content for note in app.chat.query(Note) if "withdrawn" in str(note.content))
        assert "and then it goes wrong" in str(struck)
        assert any("strike" in str(span.style) for span in struck.spans)
        assert answers(app)[0].text == "It begins well | and ends well."
        assert "wrong" not in answers(app)[0].query_one(Markdown).source
        assert app.controller.state.conversation.turns[-1].content == "It begins well | and ends well."


async def test_input_during_loading_is_queued_in_order(running):
    async with running() as (app, _pilot, until):
        app.controller.state.enter_phase(Phase.LOADING)
        for line in ("/mode streaming budget=256", "hello", "/set temperature 0.25", "/mode frezee"):
            await app.chat.on_prompt_sent(Prompt.Sent(line))
        press(app, "f6")
        waiting = ["/mode streaming budget=256", "hello", "/set temperature 0.25", "/mode frezee", "/next"]
        await until(lambda: texts(app.chat.query(Question)) == [f"{line}  (queued)" for line in waiting])
        await until(lambda: prompt(app).border_subtitle == "5 queued, ↑ takes the last one back")
        assert not toasts(app)
        await app.controller.answers.ready()
        await until(lambda: is_finished(app) and app.controller.state.mode == "sync")
        assert texts(app.chat.query(Question)) == ["hello"]
        assert " · streaming · " in receipts(app)[0]
        assert app.controller.state.sampling.temperature == 0.25
        assert '"frezee"' in toasts(app)


def drawn(answer: Answer) -> str:
    return "\n".join(str(block.render()) for block in answer.query("MarkdownBlock"))


async def test_f6_switches_during_an_answer(running):
    async with running() as (app, _pilot, until):
        submit(app, "slow")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        press(app, "f6")
        await until(lambda: app.controller.state.mode == "freeze")
        press(app, "shift+f6", "shift+f6")
        await until(lambda: app.controller.state.mode == "speculative")
        assert app.controller.state.phase is Phase.ANSWERING
        answer = app.chat.query(Answer).last()
        # Switches without a token between them share a mark.
        await until(lambda: re.search(r"\w ┃[¹²³]* \w", drawn(answer)))
        pattern = r"┃[¹²³]* (full|freeze|sync) → speculative · budget 512 · .*(then |\d → )\d+ tok/s"
        await until(lambda: re.search(pattern, texts(answer.query(".switches").results(Static))[0]))
        assert "tok/s" in app.chat.query_one(StatusBar).render().plain
        press(app, "escape")
        await until(lambda: is_finished(app))
        assert not app.chat.query(SwitchNote)
        assert "┃" not in answer.text
        assert app.chat.query_one(ModeBar).mode == "speculative"
        await until(lambda: app.chat.query_one(Ribbon).ticks)
        assert app.chat.query_one(Timeline).ticks == app.chat.query_one(Ribbon).ticks
        press(app, "f5")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        assert app.chat.query_one(Ribbon).ticks == (), "the switch was in another branch"
        press(app, "escape")
        await until(lambda: is_finished(app, 2))
        await app.controller.branches.select_sibling(-1)
        await until(lambda: app.chat.query_one(Ribbon).ticks)


async def test_a_new_conversation_clears_the_figures(running):
    async with running(size=(200, 60)) as (app, _pilot, until):
        chat, state = app.chat, app.controller.state
        await ask(app, "hello", mode="speculative")
        await until(lambda: "tok/s" in chat.query_one(StatusBar).render().plain)
        press(app, "ctrl+n")
        await until(lambda: chat.query(Welcome) and not chat.query_one(StatusBar).snapshot.total)
        assert chat.query_one(StatusBar).render().plain.split() == ["context", "0", "%"]
        assert chat.query_one("#context-rows", LabeledRows).rows == [("reads", "nothing stored yet")]
        recall = dict(chat.query_one("#recall-rows", LabeledRows).rows)
        assert not recall.keys() & {"hit rate", "time p50 / p95"}
        assert dict(chat.query_one("#memory-rows", LabeledRows).rows)["weights"] == "86.0 MiB"  # it stays loaded
        assert not chat.query_one("#extra-rows", LabeledRows).display
        submit(app, "/mode streaming")
        await until(lambda: chat.query(SwitchNote))
        assert texts(chat.query(SwitchNote)) == ["speculative → streaming · budget 512"]
        assert not chat.query_one(Ribbon).ticks
        await until(lambda: state.snapshot.mode == "streaming")
        assert chat.query_one(StatusBar).render().plain.split() == ["context", "0", "%"]


async def test_queued_prompts_can_be_taken_back_and_survive_a_stop(running):
    async with running(ready=False) as (app, _pilot, until):
        await ask(app, "hello")
        submit(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        queue = app.controller.answers.queue
        submit(app, "next")
        await until(lambda: len(queue) == 1)
        submit(app, "third")
        await until(lambda: len(queue) == 2)
        await until(lambda: texts(app.chat.query(Question))[-2:] == ["next  (queued)", "third  (queued)"])
        press(app, "up")
        await until(lambda: prompt(app).text == "third" and len(app.chat.query(Question)) == 3)
        prompt(app).insert(" at last")
        press(app, "enter")
        await until(lambda: len(queue) == 2 and "2 queued, ↑ takes" in str(prompt(app).border_subtitle))
        press(app, "escape")
        await until(lambda: is_finished(app, 2) and "2 held: Enter sends them" in str(prompt(app).border_subtitle))
        press(app, "enter")
        await until(lambda: is_finished(app, 4))
        questions = [turn.content for turn in app.controller.state.conversation.turns if turn.role == "user"]
        assert questions == ["hello", "hold", "next", "third at last"]


async def test_resizing_changes_the_layout_and_loses_nothing(running):
    async with running(size=(200, 60)) as (app, pilot, until):
        app.chat.add_class("figures-all")
        await ask(app, "hello")
        prompt(app).load_text("draft")
        shown = {(200, 60): (True, True), (120, 40): (True, False), (80, 24): (False, False), (40, 12): (False, False)}
        for size, (kv, detail) in shown.items():
            await pilot.resize_terminal(*size)
            await until(lambda kv=kv: app.chat.query_one(KvColumn).display is kv)
            await until(lambda detail=detail: app.chat.query_one(DetailColumn).display is detail)
            await until(lambda: not app.chat.query_one("#too-small").display)
            await until(lambda size=size: app.chat.query_one(Ribbon).size.width == size[0])
        for size in ((39, 20), (80, 11)):
            await pilot.resize_terminal(*size)
            words = f"this terminal has {size[0]}x{size[1]}:"
            await until(lambda words=words: words in texts([app.chat.query_one("#too-small", Static)])[0])
            assert app.chat.query_one("#too-small").display
        await pilot.resize_terminal(120, 40)
        await until(lambda: not app.chat.query_one("#too-small").display and prompt(app).has_focus)
        assert prompt(app).text == "draft"
        assert is_finished(app)


async def test_keys_act_on_the_selected_message_or_the_prompt(running):
    async with running() as (app, _pilot, until):
        await ask(app, "hello")
        transcript = app.chat.query_one(Transcript)
        await focus(transcript)
        press(app, "y")
        await until(lambda: prompt(app).text == "y" and prompt(app).has_focus)
        prompt(app).load_text("")
        await focus(transcript)
        press(app, "up")
        await until(lambda: app.chat.chosen and app.chat.chosen == answers(app)[0].message)
        hints = app.chat.query_one(KeyHints)
        await until(lambda: " y copy " in hints.render().plain and " [ branch " in hints.render().plain)
        press(app, "y")
        await until(lambda: app.clipboard.startswith("Section 3"))
        press(app, "c")
        await until(lambda: app.clipboard.startswith("def interest"))
        press(app, "up", "up", "e")
        await until(lambda: prompt(app).text == "hello" and prompt(app).has_focus)
        await until(lambda: "editing" in str(prompt(app).border_title) and app.chat.chosen is None)
        press(app, "escape")
        # If its text stayed in the prompt, it could be sent by mistake, an edited answer even as a question.
        await until(lambda: not prompt(app).border_title and prompt(app).text == "")
        press(app, "up")
        await until(lambda: prompt(app).text == "hello")
