"""Rebound keys are checked, work, and are shown on every screen."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from support.app_driver import is_finished, is_open, notes, press, prompt, toasts

from kvchat import tui
from kvchat.errors import UsageError
from kvchat.tui.actions import ACTIONS, BY_ID, Scope, scopes_at
from kvchat.tui.app import choices
from kvchat.tui.rebinding import check_keys, describe_key, describe_keys, hint_key, is_key
from kvchat.tui.screens.choosing import ConversationsScreen
from kvchat.tui.screens.details import DetailsScreen
from kvchat.tui.screens.help import HelpScreen, key_rows
from kvchat.tui.screens.settings import SettingsScreen
from kvchat.tui.widgets.bars import KeyHints
from kvchat.tui.widgets.ribbon import Ribbon
from kvchat.tui.widgets.welcome import Welcome

ROOT = Path(tui.__path__[0])
KEY = re.compile(r"\b(Esc|Enter|Tab|PgUp|PgDn|F[1-9][0-2]?)\b|Ctrl\+|⏎|\^[A-Z]\b|[↑↓←→]{2}")


def hints(app):
    return app.screen.query_one(KeyHints).render().plain if app.screen.query(KeyHints) else ""


def texts_of(source):
    """The string constants except docstrings, with the line each begins on."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_keys_appear_only_in_the_action_table():
    for path in sorted(ROOT.rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if name in ("rebinding.py", "actions.py"):  # key names, the making of bindings, and the table
            continue
        assert "Binding(" not in source, name
        bound = re.findall(r"^    BINDINGS.*", source, re.MULTILINE)
        assert [line for line in bound if not re.search(r"= bindings\(\"\w+\"\)$", line)] == [], name
        if not name.startswith("plain/"):  # line mode has only the terminal's keys
            assert [text for text in texts_of(source) if KEY.search(text)] == [], name


def test_every_scope_leads_to_the_application():
    assert {action.scope for action in ACTIONS} == set(get_args(Scope))
    assert [scope for scope in get_args(Scope) if [*scopes_at(scope)][-1] != "app"] == []


def test_different_scopes_may_share_a_key():
    check_keys({"ribbon.right": "y", "mode.next": "f6,f6"})
    check_keys({"mode.next": "f7", "panels": "F6"})  # swapped
    check_keys({})
    with pytest.raises(UsageError, match=r"ribbon\.left and ribbon\.right"):
        check_keys({"ribbon.left": "right"})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"mode.nxet": "f9"}, '"mode.next"'),
        ({"prompt.history": "f9"}, r"prompt\.history"),
        ({"export": "f7"}, "export and panels"),
        ({"export": ""}, "f9"),
        ({"mode.next": "f99"}, "f9"),
        ({"mode.next": ""}, "f9"),
        ({"mode.next": "x"}, "types text"),
        ({"mode.next": "f7"}, "mode.next and panels"),
    ],
)
def test_invalid_bindings_are_rejected_with_a_reason(keys, reason):
    with pytest.raises(UsageError, match=reason):
        check_keys(keys)


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
        docs = {choice.title: choice.help for choice in choices(app.chat, app.keys, app.themes)}
        assert docs["/next"].endswith("  F11")
        press(app, "f12")
        await until(lambda: is_open(app, HelpScreen))
        assert ("F11", BY_ID["mode.next"].doc) in key_rows(app.keys)
        press(app, "f12")
        await until(lambda: app.screen is app.chat)
        app.rebind({})
        await until(lambda: " F6 mode " in hints.render().plain)
        assert describe_keys(BY_ID["mode.next"], app.keys) == "F6"


WITHOUT_KEYS = {"import": "f11", "profile": "f12", "theme": "ctrl+g", "branch": "alt+b"}


async def test_an_added_key_works_and_is_shown_everywhere(running, config):
    async with running(replace(config, keys=WITHOUT_KEYS), size=(200, 60)) as (app, _pilot, until):
        await until(lambda: " F12 profile  F11 import  ^G theme" in hints(app))
        assert "none:" not in hints(app)
        docs = {choice.title: choice.help for choice in choices(app.chat, app.keys, app.themes)}
        assert docs["/import FILE"].endswith("  F11")
        assert {("F11", BY_ID["import"].doc), ("Ctrl+G", BY_ID["theme"].doc)} <= set(key_rows(app.keys))
        press(app, "f12", "ctrl+g", "alt+b")
        await until(lambda: "only one branch" in toasts(app))
        await until(lambda: [note for note in notes(app) if note.startswith("Themes: ")])
        assert [note for note in notes(app) if note.startswith("Active profiles")]
        press(app, "f11", "a")
        await until(lambda: prompt(app).text == "/import a")
        app.rebind({})
        await until(lambda: "import" not in hints(app))


def test_only_built_in_actions_cannot_be_bound():
    for action in ACTIONS:
        if action.run or action.action:
            check_keys({action.id: "f24"})
        else:
            with pytest.raises(UsageError, match="built in"):
                check_keys({action.id: "f24"})


async def test_widget_keys_can_be_rebound(running, config):
    config = replace(config, keys={"prompt.send": "ctrl+s", "ribbon.right": "l"})
    async with running(config) as (app, _pilot, until):
        await until(lambda: prompt(app).has_focus and " ^S send " in app.chat.query_one(KeyHints).render().plain)
        press(app, "a", "enter", "b", "ctrl+s")
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == "a\nb"
        ribbon = app.chat.query_one(Ribbon)
        ribbon.focus()
        await until(lambda: " l later " in app.chat.query_one(KeyHints).render().plain)
        press(app, "l")
        await until(lambda: ribbon.cursor == 1)
        assert not prompt(app).text


async def test_invalid_bindings_leave_the_defaults(running, config):
    async with running(replace(config, keys={"mode.next": "f7"})) as (app, _pilot, until):
        await until(lambda: "two things" in toasts(app))
        press(app, "f6")
        await until(lambda: app.controller.state.mode == "freeze")


REBOUND = {
    "conversations.delete": "f4",
    "search.down": "ctrl+k",  # also a key of the text field
    "search.close": "f11",
    "settings.default": "f12",
    "settings.close": "ctrl+g",
    "details.close": "x",
    "map.right": "l",
    "help.close": "f11",
}


async def test_rebound_screen_keys_work_and_are_hinted(running, config):
    async with running(replace(config, keys=REBOUND)) as (app, _pilot, until):
        press(app, "f9")
        await until(lambda: is_open(app, ConversationsScreen) and " F4 delete  ^Z restore  F11 close" in hints(app))
        assert "↑/^K choose " in hints(app)
        press(app, "ctrl+k", "f4", "escape", "f11")
        await until(lambda: app.screen is app.chat)
        press(app, "f2")
        await until(lambda: is_open(app, SettingsScreen) and " ⏎ change  F12 default " in hints(app))
        assert hints(app).endswith("^G close ")
        press(app, "ctrl+g", "shift+f7")
        await until(lambda: is_open(app, DetailsScreen) and "←/l/↑/↓ layer and head  x close" in hints(app))
        press(app, "x", "f1")
        await until(lambda: is_open(app, HelpScreen) and hints(app) == " F11 close ")
        press(app, "f11")
        await until(lambda: app.screen is app.chat)


def test_different_screens_may_share_a_key():
    check_keys({"settings.save": "ctrl+d", "settings.default": "f4", "details.close": "w"})
    with pytest.raises(UsageError, match=r"quit and help\.close"):
        check_keys({"help.close": "ctrl+q"})
    with pytest.raises(UsageError, match=r"models\.plan and search\.close"):
        check_keys({"models.plan": "escape"})
    with pytest.raises(UsageError, match="types text"):
        check_keys({"conversations.delete": "d"})


# ---- Key names


@pytest.mark.parametrize(
    ("key", "name", "hint"),
    [
        ("f6", "F6", "F6"),
        ("shift+f6", "Shift+F6", "Shift+F6"),
        ("ctrl+p", "Ctrl+P", "^P"),
        ("escape", "Esc", "esc"),
        ("enter", "Enter", "⏎"),
        ("ctrl+pageup", "Ctrl+PgUp", "^PgUp"),
        ("w", "w", "w"),  # W is another key
    ],
)
def test_key_names(key, name, hint):
    assert describe_key(key) == name
    assert hint_key(key) == hint


@pytest.mark.parametrize(("key", "known"), [("f9", True), ("alt+x", True), ("f99", False), ("x+ctrl", False)])
def test_known_keys(key, known):
    assert is_key(key) is known
