import errno
import json
import os
import re

import pytest
from support.hostile import forbidden_in, hostile
from support.message import lacks

import kvchat
from kvchat import files, paths
from kvchat.cli import chat
from kvchat.config.modes import choosable
from kvchat.tui import actions, app
from kvchat.tui.state import AppConfig


def test_options_before_a_command_apply_to_it(run, session):
    assert run("-m", "ask", "--mode", "streaming", "ask", "hello").code == 0
    assert (session.loaded.model, session.loaded.mode) == ("ask", "streaming")
    assert "-c" in run("-c", "ask", "hello").err


@pytest.mark.parametrize("command", [[], ["bench"], ["chats"], ["profile"], ["config"]])
def test_command_summaries_fit_on_one_line(run, command):
    listed = run(*command, "--help").out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed


def test_version_and_help_are_printed(run):
    assert run("--version") == (0, f"kvchat {paths.with_commit(kvchat.__version__)}\n", "")
    assert "ask" in run("-h").out


def test_locate_creates_nothing(run, tmp_path):
    out = run("locate").out
    assert str(paths.config_file()) in out
    assert "(does not exist yet)" in out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_settings_file_behind(run, full_disk):
    outcome = run("config", "init")
    assert outcome.code == 2
    assert not lacks(outcome.err, str(paths.config_file()), os.strerror(errno.ENOSPC))
    assert not list(paths.config_dir().iterdir())


def test_config_init_show_validate_schema(run):
    assert run("config", "validate").code == 0
    assert run("config", "init").out == f"{paths.config_file()}\n"
    assert run("config", "init").code == 2
    assert run("config", "validate") == (0, f"{paths.config_file()}: valid\n", "")
    paths.config_file().write_text('[kv]\nmode = "streaming"\n')
    assert 'kv.mode = "streaming"   # config.toml:2' in run("config", "show").out
    assert "kv" in json.loads(run("config", "schema").out)["properties"]


def test_an_invalid_config_is_rejected_with_its_line(run, session, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("[kv]\nmod = 1\n")
    assert run("config", "validate", str(other)).err.startswith("kvchat: other.toml:2: kv.mod: ")
    assert run("config", "validate", str(tmp_path / "no")).code == 2
    assert run("config", "validate", str(paths.bundled_profiles_dir() / "8gb.toml")).code == 0
    other.write_text("[match]\nmemory = [7]\n")
    assert "match.memory.1: [7]" in run("config", "validate", str(other)).err
    for text, words in (
        ('[ui]\ntheme = "kvchat-drak"\n', 'other.toml:2: there is no theme "kvchat-drak". Did you mean "kvchat-dark"?'),
        ('[keys]\nmode.next = "ctrl+n"\n', 'other.toml:2: [keys]: The key "ctrl+n" would do two things'),
        ('[keys]\nmode.nxt = "f8"\n', 'Did you mean "mode.next"?'),
    ):
        other.write_text(text)
        assert words in run("config", "validate", str(other)).err
    paths.config_file().parent.mkdir()
    paths.config_file().write_text("[kv\n")
    for command in ([], ["ask", "hello"], ["config", "show"], ["config", "validate"]):
        outcome = run(*command)
        assert outcome.code == 2
        assert outcome.err.startswith("kvchat: config.toml:1: ")
    assert run("modes").code == 0


# ---- The settings without a screen: shown and checked


def test_all_config_errors_are_reported_at_once(run):
    text = "[zork]\na = 1\n[kv]\nmode = 'spec'\n[ui]\ntheme = 'kvchat-drak'\n[keys]\nmode.nxt = 'f8'\n"
    files.write(paths.config_file(), text.encode())
    outcome = run("config", "validate")
    assert outcome.code == 2
    for words in (
        "config.toml:1: zork: there is no such setting",
        'config.toml:4: kv.mode: "spec" is not valid: it must be one of',
        'config.toml:6: there is no theme "kvchat-drak". Did you mean "kvchat-dark"?',
        f"Your own themes are files in {paths.user_themes_dir()}.\n  {paths.config_file()}\n  theme = 'kvchat-drak'",
        'config.toml:8: [keys]: There is no action "mode.nxt".',
        f"\n  {paths.config_file()}\n  mode.nxt = 'f8'",
    ):
        assert words in outcome.err


def test_each_config_error_is_reported_once(run):
    files.write(paths.config_file(), b"[ui]\ntheme = 1\n[keys]\nquit = 2\n")
    outcome = run("config", "validate")
    assert outcome.err.count("config.toml") == 4, "two places with two paths"


def test_environment_settings_are_checked_unless_a_file_is_named(run, monkeypatch, tmp_path):
    monkeypatch.setenv("KVCHAT_KV_MODE", "spec")
    monkeypatch.setenv("KVCHAT_UI_THEME", "kvchat-drak")
    files.write(paths.config_file(), b"[kv]\nbudgte = 1\n")
    outcome = run("config", "validate")
    assert outcome.code == 2
    for words in ("config.toml:2: kv.budgte", 'KVCHAT_KV_MODE: "spec"', "KVCHAT_UI_THEME: there is no theme"):
        assert words in outcome.err
    (tmp_path / "other.toml").touch()
    assert run("config", "validate", str(tmp_path / "other.toml")).code == 0


def test_unknown_environment_variables_are_reported(run, monkeypatch):
    monkeypatch.setenv("KVCHAT_FOO", "1")
    outcome = run("config", "show")
    assert outcome.code == 0
    assert "KVCHAT_FOO" in outcome.err


# ---- kvchat keys


def test_keys_lists_actions_with_configured_keys(run):
    files.write(paths.config_file(), b'[keys]\nmode.next = "f12"\nexport = "f11"\n')
    listed = {row["id"]: row for row in json.loads(run("keys", "--json").out)}
    assert set(listed) == set(actions.BY_ID)
    assert (listed["mode.next"]["keys"], listed["mode.next"]["default_keys"]) == (["f12"], ["f6"])
    assert (listed["export"]["keys"], listed["export"]["can_be_changed"]) == (["f11"], True)
    row = next(line for line in run("keys").out.splitlines() if "mode.next " in line)
    assert row.split()[:3] == ["F12", "mode.next", "/next"]


# ---- kvchat modes


def test_modes_lists_parameters_and_defaults(run):
    listed = {mode["name"]: mode for mode in json.loads(run("modes", "--json").out)}
    assert list(listed) == list(choosable())
    defaults = {param["name"]: param["default"] for param in listed["speculative"]["params"]}
    assert (defaults["tau"], defaults["index"]) == (None, None)
    assert defaults["pin_system"] is False
    text = run("modes").out
    assert "index      auto" in text


# ---- The first word: a command, a typo in one, or a question that opens the chat


@pytest.fixture
def started(monkeypatch):
    started: list[AppConfig] = []
    monkeypatch.setattr(app, "run", lambda config: started.append(config) or 0)
    monkeypatch.setattr(chat, "prefers_lines", lambda: False)
    return started


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["hello there"], "hello there"),
        (["hello"], "hello"),
        (["list models"], "list models"),
        (["chat", "ask"], "ask"),
        (["-m", "there", "hello"], "hello"),
        (["hello", "-m", "there"], "hello"),
        (["Schön?"], "Schön?"),
        (["tell", "me", "a", "story", "-m", "there"], "tell me a story"),
        ([], ""),
    ],
)
def test_a_question_instead_of_a_command_opens_the_chat(run, started, arguments, asked):
    assert run(*arguments) == (0, "", "")
    assert started[0].prompt == asked
    assert started[0].load.model == ("there" if "-m" in arguments else "bundled")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *(("aks", "ask"), ("bnech", "bench"), ("cmopare", "compare"), ("help", "--help"), ("version", "--version")),
        *(("run smollm2", "-m MODEL"), ("list", "models")),
    ],
)
def test_a_mistyped_command_is_not_a_question(run, started, word, meant):
    outcome = run(*word.split())
    assert outcome.code == 2
    assert not lacks(outcome.err, f'"{word.split()[0]}"', f" {meant}?", f'kvchat chat "{word}"')
    assert not started


@pytest.mark.parametrize("line", ["ask hello", "models", "config show", "config validate"])
def test_commands_report_misspelled_variables(run, session, monkeypatch, line):
    monkeypatch.setenv("KVCHAT_MODLE_NAME", "x")
    outcome = run(*line.split())
    assert (outcome.code, outcome.err.count("KVCHAT_MODLE_NAME")) == (0, 1)


COMMANDS = ("ask", "compare", "replay", "plan", "chats list", "chats export", "chats import", "config validate")


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_are_named_in_capitals(run, command):
    usage = run(*command.split(), "--help").out.split("\n\n")[0]
    assert re.findall(r"[{[]([\w-]+)", usage)
    assert not re.search(r"[{[][a-z]", usage)


def test_invalid_utf8_is_rejected(run, started):
    assert not lacks(run("Sch\udcf6n ist das").err, "UTF-8", "Byte 3", "0xf6")


@pytest.mark.parametrize(
    "line",
    [
        *("--mode TYPED", "chat --mode TYPED", "ask --seed TYPED", "ask hello --mode TYPED"),
        *("ask hello -m ./TYPED", "ask -f TYPED", "config validate TYPED"),
    ],
)
def test_error_messages_sanitize_user_input(run, line):
    typed = hostile("typed").replace("\x00", "")  # program arguments cannot contain NUL
    outcome = run(*(word.replace("TYPED", typed) for word in line.split()))
    assert outcome.code == 2
    assert not forbidden_in(outcome.err.encode())
    assert "typed" in outcome.err
