"""What is offered while a command is typed: names, then values with the current one marked."""

from __future__ import annotations

import pytest
from support.app_driver import CHARACTERS, finished, press, prompt, texts, toasts, typed
from support.message import lacks

from kvchat.conversations.attachments import fenced
from kvchat.conversations.conversation import Conversation
from kvchat.protocol.messages import Sampling
from kvchat.tui.actions import COMMANDS
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.widgets import composer
from kvchat.tui.widgets.composer import SuggestionList
from kvchat.tui.widgets.messages import Question

STATE = ChatState(Conversation(), Sampling(temperature=0.5), "streaming", {"budget": 512, "sigma": 64})
NOW = Surroundings(STATE, ("kvchat-dark", "kvchat-light"), "kvchat-light")


def offered(before: str) -> list[str]:
    offer = composer.offer(before, NOW)
    return [suggestion.text for suggestion in offer.suggestions] if offer else []


def test_a_slash_lists_all_commands_with_their_use():
    offer = composer.offer("/", NOW)
    assert {one.label for one in offer.suggestions} == {action.line for action in COMMANDS.values()}
    assert all(one.doc for one in offer.suggestions)
    assert [one.text.strip() for one in offer.suggestions][:4] == ["/mode", "/budget", "/new", "/model"]
    assert offer.takes_by_enter


@pytest.mark.parametrize(
    ("typed", "takes"), [("/", True), ("/mo", True), ("/mode", False), ("/exi", False), ("/bud", False)]
)
def test_enter_takes_what_is_selected_where_no_one_command_is_named(typed, takes):
    assert composer.offer(typed, NOW).takes_by_enter == takes


@pytest.mark.parametrize(
    ("before", "texts"),
    [
        ("/exi", ["/quit"]),
        ("/uild", ["/rebuild"]),
        ("/BUD", ["/budget "]),
        ("/mode s", ["streaming", "sync", "speculative", "shadowkv", "snapkv"]),
        ("/mo spec t", ["tau="]),
        ("/mode speculative tau=0.7 fir", ["first_full="]),
        ("/set temp", ["temperature "]),
        ("/set recovery ", ["true", "false"]),
        ("/set temperature ", ["0.5"]),
        ("/budget ", ["512"]),
        ("/theme ", ["kvchat-dark", "kvchat-light"]),
        ("/system ", ["none"]),
        ("/nothing ", []),
        ("/stats ", []),
        ("//mode ", []),
        ("what is /mode", []),
    ],
)
def test_what_may_follow(before, texts):
    assert offered(before) == texts


def test_present_values_are_marked_and_ranges_told():
    modes = composer.offer("/mode ", NOW)
    assert [one.label for one in modes.suggestions if one.is_current] == ["streaming"]
    assert modes.usage.startswith("/mode NAME")
    rows = {one.label: one.doc for one in composer.offer("/set ", NOW).suggestions}
    assert not lacks(rows["temperature 0.5"], "0 to 100", "unset")
    assert not lacks(rows["budget 512"], "whole number", "64")
    assert [one.is_current for one in composer.offer("/theme ", NOW).suggestions] == [False, True]


def test_paths_are_offered_to_commands_and_files_in_a_question(tmp_path):
    (tmp_path / "b c.json").touch()
    assert offered(f"/import {tmp_path}/") == [f"{tmp_path}/b c.json"]
    assert offered(f"read @{tmp_path}/") == [f'@"{tmp_path}/b c.json" ']


# ---- The list above the prompt: keys choose, take and close; a mentioned file is sent whole and shown folded


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
        assert prompt(app).written.text == question


async def test_a_refused_file_leaves_the_prompt_as_it_was(running, tmp_path):
    async with running() as (app, _pilot, until):
        typed(app, f"read @{tmp_path}/none.txt now")
        await until(lambda: "There is no file" in toasts(app))
        await until(lambda: prompt(app).text == f"read @{tmp_path}/none.txt now")
        assert not app.chat.query(Question)
