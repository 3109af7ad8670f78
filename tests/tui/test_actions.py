"""The one table of actions: complete, unambiguous, and shown with the keys in force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.app_driver import finished, opened, press, prompt, toasts, typed

from kvchat.errors import UsageError
from kvchat.tui.actions import (
    ACTIONS,
    ALIASES,
    BY_ID,
    COMMANDS,
    check_keys,
    describe_keys,
    find_command,
    is_command,
    parse_command,
)
from kvchat.tui.palette import choices
from kvchat.tui.screens.help import HelpScreen, key_rows
from kvchat.tui.widgets.bars import KeyHints
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.welcome import Welcome

SLASH = (
    "stop queue mode next previous budget sink window set system pin regen continue edit undo branch rebuild new "
    "last open title fork delete restore export import stats copy code compare needle pause speed editor file thinking "
    "theme panels details restart help settings chats quit model unload plan profile"
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
    ("name", "said"),
    [
        ("compair", "There is no command /compair. Did you mean /compare or /"),
        ("zzz", "There is no command /zzz. /help lists all."),
        ("", "There is no command /."),
        ("re", '"re" is the beginning of several'),
    ],
)
def test_an_unknown_command_names_the_nearest_few(name, said):
    with pytest.raises(UsageError) as refused:
        find_command(name)
    assert str(refused.value).startswith(said)
    assert len(str(refused.value)) < 160


def test_other_programs_names_find_the_conversations():
    assert {find_command(name).id for name in ("find", "sessions", "history")} == {"conversations"}
    assert parse_command("/find a cat") == (BY_ID["conversations"], "a cat")


def test_default_keys_do_not_clash():
    check_keys({})


def test_a_key_may_do_something_in_each_part_that_has_the_focus():
    check_keys({"ribbon.right": "y", "mode.next": "f6,f6"})
    with pytest.raises(UsageError, match=r"two things: ribbon\.left and ribbon\.right"):
        check_keys({"ribbon.left": "right"})


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/mode full", True),
        ("/no-such-thing", True),
        ("//literal", False),
        ("/system a\nb", True),
        ("/etc/hosts:\n1 localhost", False),
        ("what is /mode", False),
    ],
)
def test_what_is_a_command(text, command):
    assert is_command(text) is command


def test_commands_are_split_from_their_arguments():
    assert parse_command("/MODE  streaming budget=512 ") == (BY_ID["mode"], "streaming budget=512")
    with pytest.raises(UsageError, match="Did you mean /budget"):
        parse_command("/buget 5")


@pytest.mark.parametrize(
    ("typed", "id"),
    [("mo", "mode"), ("bu", "budget"), ("exit", "quit"), ("ex", "export"), ("cle", "new"), ("?", "help")],
)
def test_the_beginning_of_a_name_or_an_alias_will_do(typed, id):
    assert parse_command(f"/{typed} x") == (BY_ID[id], "x")


def test_a_beginning_of_several_names_them():
    with pytest.raises(UsageError, match=r'"re" is the beginning of several: rebuild, regen, restart, restore\.'):
        parse_command("/re")


def test_aliases_hide_no_command():
    assert not set(ALIASES) & set(COMMANDS)
    assert len(ALIASES) == sum(len(action.aliases) for action in ACTIONS)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"mode.nxet": "f9"}, 'Did you mean "mode.next"'),
        ({"prompt.history": "f9"}, "no action"),
        ({"mode.next": "f99"}, "Keys are written as in f9"),
        ({"mode.next": ""}, "Keys are written as in f9"),
        ({"mode.next": "x"}, "types text"),
        ({"mode.next": "f7"}, "two things: mode.next and panels"),
    ],
)
def test_refused_keys_say_why(keys, reason):
    with pytest.raises(UsageError, match=reason):
        check_keys(keys)


def test_two_actions_can_trade_their_keys():
    check_keys({"mode.next": "f7", "panels": "F6"})


async def test_a_rebound_key_works_and_is_shown_everywhere(running, config):
    config = replace(config, keys={"mode.next": "f11", "help": "f12"})
    async with running(config) as (app, _pilot, until):
        await until(lambda: app.chat.query(Welcome))
        assert "F11 changes" in str(app.chat.query_one(Welcome).content)
        hints = app.chat.query_one(KeyHints)
        await until(lambda: " F11 mode " in hints.render().plain and " F12 help" in hints.render().plain)
        assert "F6" not in hints.render().plain
        press(app, "f6", "f11")
        await until(lambda: app.controller.state.mode == "freeze")
        docs = {choice.title: choice.doc for choice in choices(app.chat, app.keys, app.themes)}
        assert docs["/next"].endswith("  F11")
        press(app, "f12")
        await until(lambda: opened(app, HelpScreen))
        assert ("F11", BY_ID["mode.next"].doc) in key_rows(app.keys)
        press(app, "f12")
        await until(lambda: app.screen is app.chat)
        app.rebind({})
        await until(lambda: " F6 mode " in hints.render().plain)
        assert describe_keys(BY_ID["mode.next"], app.keys) == "F6"


async def test_keys_of_widgets_can_be_rebound(running, config):
    config = replace(config, keys={"prompt.send": "ctrl+s", "ribbon.right": "l"})
    async with running(config) as (app, _pilot, until):
        await until(lambda: prompt(app).has_focus and " ^S send " in app.chat.query_one(KeyHints).render().plain)
        press(app, "a", "enter", "b", "ctrl+s")
        await until(lambda: finished(app))
        assert app.controller.state.conversation.turns[0].content == "a\nb"
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: " L later " in app.chat.query_one(KeyHints).render().plain)
        press(app, "l")
        await until(lambda: ribbon.cursor == 1)
        assert not prompt(app).text


async def test_refused_keys_leave_the_defaults(running, config):
    async with running(replace(config, keys={"mode.next": "f7"})) as (app, _pilot, until):
        await until(lambda: "two things" in toasts(app))
        press(app, "f6")
        await until(lambda: app.controller.state.mode == "freeze")


async def test_what_is_refused_is_a_toast(running):
    async with running() as (app, _pilot, until):
        press(app, "f5")
        await until(lambda: "There is no question yet" in toasts(app))
        typed(app, "/undo x")
        await until(lambda: toasts(app).count("There is no question yet") == 2)
        assert not app.chat.query("Problem")
