"""The one table of actions: complete, unambiguous, and shown with the keys in force."""

from __future__ import annotations

import pytest
from support.app_driver import press, toasts, typed
from support.message import lacks

from kvchat.errors import UsageError
from kvchat.tui.actions import (
    ACTIONS,
    ALIASES,
    BY_ID,
    COMMANDS,
    find_command,
    is_command,
    parse_command,
)

SLASH = (
    "stop queue mode next previous budget sink window draft set system pin regen continue edit undo branch rebuild new "
    "last open title fork delete restore export import stats copy code compare needle pause speed editor file "
    "thinking theme panels details restart help settings chats quit model servers unload plan profile newest think "
    "template preset"
)


def test_every_action_has_a_description_and_a_way_to_reach_it():
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
        ("re", ('"re"', "ambiguous")),
    ],
)
def test_an_unknown_command_names_the_nearest_few(name, facts):
    with pytest.raises(UsageError) as refused:
        find_command(name)
    assert not lacks(refused.value, *facts)
    assert len(str(refused.value)) < 160


def test_other_programs_names_find_the_conversations():
    assert {find_command(name).id for name in ("find", "sessions", "history")} == {"conversations"}
    assert parse_command("/find a cat") == (BY_ID["conversations"], "a cat")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/mode full", True),
        ("/no-such-thing", True),
        ("/", True),
        ("/?", True),
        ("/Mode full", True),
        ("/budget=512", True),
        ("//literal", False),
        ("// a comment", False),
        ("/* a comment */", False),
        ("/usr/bin/python: No module named kvchat", False),
        ("/tmp is full, what now?", False),
        ("/tmp: is it full?", False),
        ("/^[a-z]+$/ matches what?", False),
        ("/3 of it", False),
        ("/find . -name x\n/find .", False),
        ("/system a\nb", True),
        ("/etc/hosts:\n1 localhost", False),
        ("what is /mode", False),
    ],
)
def test_what_is_a_command(text, command):
    assert is_command(text) is command


def test_commands_are_split_from_their_arguments():
    assert parse_command("/MODE  streaming budget=512 ") == (BY_ID["mode"], "streaming budget=512")
    with pytest.raises(UsageError, match="/budget"):
        parse_command("/buget 5")


@pytest.mark.parametrize(
    ("typed", "id"),
    [("mo", "mode"), ("bu", "budget"), ("exit", "quit"), ("ex", "export"), ("cle", "new"), ("?", "help")],
)
def test_the_beginning_of_a_name_or_an_alias_will_do(typed, id):
    argument = "x" if BY_ID[id].usage else ""
    assert parse_command(f"/{typed} {argument}") == (BY_ID[id], argument)


@pytest.mark.parametrize("line", ["/new foo", "/undo 3", "/retry x", "/rebuild y", "/panels off"])
def test_a_command_that_takes_no_argument_refuses_one(line):
    with pytest.raises(UsageError, match=r'^/\w+ "\w+".*no argument'):
        parse_command(line)


def test_a_beginning_of_several_names_them():
    with pytest.raises(UsageError, match=r'"re".*rebuild, regen, restart, restore'):
        parse_command("/re")


def test_aliases_hide_no_command():
    assert not set(ALIASES) & set(COMMANDS)
    assert len(ALIASES) == sum(len(action.aliases) for action in ACTIONS)


async def test_what_is_refused_is_a_toast(running):
    async with running() as (app, _pilot, until):
        press(app, "f5")
        await until(lambda: "There is no question yet" in toasts(app))
        typed(app, "/undo")
        await until(lambda: toasts(app).count("There is no question yet") == 2)
        assert not app.chat.query("Problem")
