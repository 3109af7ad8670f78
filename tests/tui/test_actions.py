"""The table of actions is complete and unambiguous, and is shown with the current keys."""

import re
from dataclasses import replace

import pytest
from support.app_driver import CHARACTERS, ask, focus, is_finished, press, prompt, submit, texts, toasts
from support.message import lacks
from textual.command import CommandInput, CommandList

from kvchat.conversations.attachments import fenced
from kvchat.conversations.conversation import Conversation
from kvchat.errors import UsageError
from kvchat.protocol.messages import Sampling
from kvchat.tui.actions import ACTIONS, ALIASES, BY_ID, COMMANDS, find_command, is_command, parse_command
from kvchat.tui.app import REACHED, choices
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.state import ChatState, Phase
from kvchat.tui.widgets import composer
from kvchat.tui.widgets.composer import SuggestionList
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.transcript import Transcript

SLASH = (
    "stop queue mode next previous budget sink window draft set system pin regen continue edit undo branch rebuild new "
    "last open title fork delete restore export import stats copy code compare needle pause speed editor file "
    "thinking theme panels details restart help settings chats quit model servers unload plan profile newest think "
    "template preset"
)


def test_every_action_is_described_and_reachable():
    assert len(BY_ID) == len(ACTIONS)
    for action in ACTIONS:
        assert action.doc
        assert action.keys or action.command
        assert not (action.run and action.action)
        assert "[" not in action.line  # the palette reads it as markup
    assert sorted(COMMANDS) == sorted(SLASH.split())


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("compair", ("/compair", "/compare")),
        ("zzz", ("/zzz", "/help")),
        ("", ("/",)),
        ("re", ('"re"', "ambiguous: rebuild, regen,")),
    ],
)
def test_an_unknown_command_suggests_the_nearest(name, facts):
    with pytest.raises(UsageError) as refused:
        parse_command(f"/{name}")
    assert not lacks(refused.value, *facts)
    assert len(str(refused.value)) < 160


def test_names_from_other_programs_find_the_conversations():
    assert {find_command(name).id for name in ("find", "sessions", "history")} == {"conversations"}
    assert parse_command("/find a cat") == (BY_ID["conversations"], "a cat")


@pytest.mark.parametrize(
    "text", ["/mode full", "/no-such-thing", "/", "/?", "/Mode full", "/budget=512", "/system a\nb"]
)
def test_commands_are_recognized(text):
    assert is_command(text)


@pytest.mark.parametrize(
    "text",
    [
        *("//literal", "// a comment", "/* a comment */", "/usr/bin/python: No module named kvchat"),
        *("/tmp is full, what now?", "/tmp: is it full?", "/^[a-z]+$/ matches what?", "/3 of it"),
        *("/find . -name x\n/find .", "/etc/hosts:\n1 localhost", "what is /mode"),
    ],
)
def test_other_text_is_not_a_command(text):
    assert not is_command(text)


def test_commands_are_split_from_their_arguments():
    for space in ("  ", "\t", "\n"):
        assert parse_command(f"/MODE{space}streaming budget=512 ") == (BY_ID["mode"], "streaming budget=512")
    with pytest.raises(UsageError, match="/budget"):
        parse_command("/buget 5")


@pytest.mark.parametrize(
    ("typed", "id"),
    [("mo", "mode"), ("bu", "budget"), ("exit", "quit"), ("ex", "export"), ("sea", "conversations"), ("?", "help")],
)
def test_prefixes_and_aliases_are_accepted(typed, id):
    argument = "x" if BY_ID[id].usage else ""
    assert parse_command(f"/{typed} {argument}") == (BY_ID[id], argument)


@pytest.mark.parametrize("action", [action for action in ACTIONS if action.needs_argument], ids=lambda one: one.id)
def test_a_missing_argument_is_named(action):
    with pytest.raises(UsageError, match=f"{re.escape(action.line)}:"):
        parse_command(f"/{action.command} ")


@pytest.mark.parametrize("line", ["/new foo", "/undo 3", "/retry x", "/rebuild y", "/panels off"])
def test_unexpected_arguments_are_rejected(line):
    with pytest.raises(UsageError, match=r'^/\w+ "\w+".*no argument'):
        parse_command(line)


def test_aliases_hide_no_command():
    assert not set(ALIASES) & set(COMMANDS)
    assert len(ALIASES) == sum(len(action.aliases) for action in ACTIONS)


# ---- The palette's choices; driving it is tested in tests/tui/screens


THEME = 'name = "[bold]odd[/] name"\nprimary = "#ffffff"\n'


async def test_markup_in_theme_names_is_text(running, config, tmp_path):
    (tmp_path / "odd.toml").write_text(THEME)
    async with running(replace(config, theme_dirs=(tmp_path,)), ready=False) as (app, _pilot, until):
        assert "[bold]odd[/] name" in app.themes, app._theme_problems
        await until(lambda: app.screen is app.chat)
        press(app, "ctrl+p")
        await until(lambda: prompts(app, "[bold]odd[/] name"))
        app.screen.query_one(CommandInput).value = "odd[/] name"
        await until(lambda: len(prompts(app, "[bold]odd[/] name")) == 1)


def test_the_palette_lists_every_chat_action():
    titles = {choice.title for choice in choices(FakeScreen(), {}, ())}
    commands = {action.run for action in ACTIONS if action.command}
    for action in ACTIONS:
        if action.is_bindable and action.scope in REACHED:
            keyed = action.id.replace(".", " ")
            assert action.line in titles if action.command else keyed in titles or action.run in commands
    assert {"branch previous", "page up", "page down", "ribbon first", "message previous"} <= titles


async def test_key_only_actions_work_from_the_palette(running):
    async with running() as (app, _pilot, until):
        press(app, "f5")
        await until(lambda: "There is no question yet" in toasts(app))
        submit(app, "/undo")
        await until(lambda: toasts(app).count("There is no question yet") == 2)
        assert not app.chat.query("Problem")
        await ask(app, "hello", "hello")
        acts = {choice.title: choice.callback for choice in choices(app.chat, app.keys, ())}
        transcript, conversation = app.chat.query_one(Transcript), app.controller.state.conversation
        acts["message previous"]()
        await until(lambda: transcript.has_focus and transcript.chosen == conversation.leaf.id)
        acts["branch previous"]()
        await until(lambda: "only one branch" in toasts(app))
        acts["ribbon first"]()
        await until(lambda: app.chat.query_one(Ribbon).has_focus)
        await until(lambda: transcript.scroll_y == transcript.max_scroll_y > 0)
        acts["page up"]()
        await until(lambda: transcript.scroll_y < transcript.max_scroll_y)
        acts["/newest"]()
        await until(lambda: transcript.scroll_y == transcript.max_scroll_y)
        acts["replay faster"]()
        await until(lambda: "replay" in toasts(app).lower() or "recording" in toasts(app).lower())
        press(app, "f5")
        await until(lambda: is_finished(app, 3))
        second = conversation.leaf.id
        await focus(prompt(app))
        submit(app, "/branch previous")
        await until(lambda: conversation.leaf.id != second)
        submit(app, "/branch")
        await until(lambda: conversation.leaf.id == second)
        submit(app, "/branch sideways")
        await until(lambda: "next or previous" in toasts(app))


class FakeScreen:
    """A chat screen with only the names."""

    begin_command = run_command = run_from_palette = call_later = print


def prompts(app, text: str) -> list[str]:
    """The lines of the open palette that contain the text."""
    listed = app.screen.query(CommandList)
    shown = [str(choice.prompt) for choice in listed.first().options] if listed else []
    return [line for line in shown if text in line]


# ---- Completion of commands: names, then values with the current one marked


STATE = ChatState(Conversation(), Sampling(temperature=0.5), "streaming", {"budget": 512, "sigma": 64})
NOW = Surroundings(STATE, ("kvchat-dark", "kvchat-light"), "kvchat-light")


def offered(before: str) -> list[str]:
    offer = composer.offer(before, NOW)
    return [suggestion.text for suggestion in offer.suggestions] if offer else []


def test_a_slash_lists_all_commands():
    offer = composer.offer("/", NOW)
    assert {one.label for one in offer.suggestions} == {action.line for action in COMMANDS.values()}
    assert all(one.doc for one in offer.suggestions)
    assert [one.text.strip() for one in offer.suggestions][:4] == ["/mode", "/budget", "/new", "/model"]
    assert offer.takes_by_enter


@pytest.mark.parametrize(
    ("typed", "takes"), [("/", True), ("/mo", True), ("/mode", False), ("/exi", False), ("/bud", False)]
)
def test_enter_completes_only_ambiguous_commands(typed, takes):
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
def test_commands_and_values_are_completed(before, texts):
    assert offered(before) == texts


def test_current_values_are_marked_and_ranges_shown():
    modes = composer.offer("/mode ", NOW)
    assert [one.label for one in modes.suggestions if one.is_current] == ["streaming"]
    assert modes.usage.startswith("/mode NAME")
    rows = {one.label: one.doc for one in composer.offer("/set ", NOW).suggestions}
    assert not lacks(rows["temperature 0.5"], "0 to 100", "unset")
    assert not lacks(rows["budget 512"], "whole number", "64")
    assert [one.is_current for one in composer.offer("/theme ", NOW).suggestions] == [False, True]


def test_paths_are_completed_in_commands_and_questions(tmp_path):
    (tmp_path / "b c.json").touch()
    assert offered(f"/import {tmp_path}/") == [f"{tmp_path}/b c.json"]
    assert offered(f"read @{tmp_path}/") == [f'@"{tmp_path}/b c.json" ']


# ---- The list above the prompt: keys select, accept and close; a mentioned file is sent whole and shown folded


NAMES = {character: name for name, character in CHARACTERS.items()}


def keys(text: str) -> list[str]:
    return [NAMES.get(character, character) for character in text]


async def test_keys_complete_send_and_close_suggestions(running):
    async with running(size=(80, 24)) as (app, _pilot, until):
        suggestions = app.chat.query_one(SuggestionList)
        press(app, *keys("/mo"), "tab", *keys("s"), "down", "down", "tab")
        await until(lambda: prompt(app).text == "/mode sync")
        press(app, "enter")
        await until(lambda: app.controller.state.mode == "sync")
        press(app, "up")
        # A recalled command is complete, so Up moves on to earlier ones.
        await until(lambda: prompt(app).text == "/mode sync" and not suggestions.display)
        assert prompt(app).has_focus
        submit(app, "hold")
        await until(lambda: app.controller.state.phase is Phase.ANSWERING)
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


async def test_a_mentioned_file_is_sent_whole_and_shown_folded(running, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    async with running() as (app, _pilot, until):
        press(app, *keys("sum @n"))
        await until(lambda: app.chat.query_one(SuggestionList).display)  # the folder is read in the background
        press(app, "enter")
        await until(lambda: prompt(app).text == "sum @notes.txt ")
        press(app, "enter")
        await until(lambda: is_finished(app))
        question = app.controller.state.conversation.turns[0].content
        assert question == fenced("notes.txt", "one\ntwo\n") + "\n\nsum notes.txt "
        assert texts(app.chat.query(Question)) == ["[notes.txt · 8 B]\nsum notes.txt "]
        press(app, "up")
        await until(lambda: prompt(app).text == "sum @notes.txt ")
        prompt(app).load_text("")
        submit(app, "/edit")
        await until(lambda: prompt(app).text == "[notes.txt · 8 B]\n\nsum notes.txt ")
        assert prompt(app).written.text == question
