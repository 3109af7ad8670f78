"""The list above the prompt: keys choose, take and close; a mentioned file is sent whole and shown folded."""

from __future__ import annotations

from support.app_driver import CHARACTERS, finished, press, prompt, texts, toasts, typed

from kvchat.conversations.attachments import fenced
from kvchat.tui.state import Phase
from kvchat.tui.widgets.composer import SuggestionList
from kvchat.tui.widgets.messages import Question

NAMES = {character: name for name, character in CHARACTERS.items()}


def keys(text: str) -> list[str]:
    return [NAMES.get(character, character) for character in text]


async def test_a_command_is_completed_by_tab_and_arrows_and_sent_by_enter(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        suggestions = app.chat.query_one(SuggestionList)
        press(app, *keys("/mo"), "tab", *keys("s"), "down", "down", "tab")
        await until(lambda: prompt(app).text == "/mode sync")
        press(app, "enter")
        await until(lambda: app.controller.state.mode == "sync")
        press(app, "up")
        # A recalled command is complete: Up goes on to earlier ones.
        await until(lambda: prompt(app).text == "/mode sync" and not suggestions.display)
        assert prompt(app).has_focus


async def test_escape_closes_the_list_and_only_that(running):
    async with running() as (app, _pilot, until):
        typed(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
        suggestions = app.chat.query_one(SuggestionList)
        press(app, "slash")
        await until(lambda: suggestions.display)
        press(app, "escape")
        await until(lambda: not suggestions.display)
        assert app.controller.state.phase.busy
        press(app, "m")
        await until(lambda: suggestions.display)
        press(app, "escape", "escape")
        await until(lambda: not app.controller.state.phase.busy)
        assert prompt(app).text == "/m"


async def test_a_file_is_taken_by_enter_sent_whole_and_shown_folded(running, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    async with running() as (app, _pilot, until):
        press(app, *keys("sum @n"))
        await until(lambda: app.chat.query_one(SuggestionList).display)  # the folder is read beside typing
        press(app, "enter")
        await until(lambda: prompt(app).text == "sum @notes.txt ")
        press(app, "enter")
        await until(lambda: finished(app))
        question = app.controller.state.conversation.turns[0].content
        assert question == fenced("notes.txt", "one\ntwo\n") + "\n\nsum notes.txt "
        assert texts(app.chat.query(Question)) == ["❯ [notes.txt · 8 B]\n  sum notes.txt "]
        press(app, "up")
        await until(lambda: prompt(app).text == "sum @notes.txt ")
        prompt(app).load_text("")
        typed(app, "/edit")
        await until(lambda: prompt(app).text == "[notes.txt · 8 B]\n\nsum notes.txt ")
        assert prompt(app).expanded() == question


async def test_a_refused_file_leaves_the_prompt_as_it_was(running, tmp_path):
    async with running() as (app, _pilot, until):
        typed(app, f"read @{tmp_path}/none.txt now")
        await until(lambda: "There is no file" in toasts(app))
        await until(lambda: prompt(app).text == f"read @{tmp_path}/none.txt now")
        assert not app.chat.query(Question)
