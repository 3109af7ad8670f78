"""The settings without a screen: shown and checked."""

from __future__ import annotations

import pytest
from support.command_line import Run

from kvchat import files, paths


def test_all_that_is_wrong_is_said_at_once(run: Run) -> None:
    text = "[zork]\na = 1\n[kv]\nmode = 'spec'\n[ui]\ntheme = 'kvchat-drak'\n[keys]\nmode.nxt = 'f8'\n"
    files.write(paths.config_file(), text.encode())
    outcome = run("config", "validate")
    assert outcome.code == 2
    for words in (
        "config.toml:1: zork: there is no such setting",
        'config.toml:4: kv.mode: "spec" is not one of',
        'config.toml:6: there is no theme "kvchat-drak". Did you mean "kvchat-dark"?',
        f"Your own are files in {paths.user_themes_dir()}.\n  {paths.config_file()}\n  theme = 'kvchat-drak'",
        'config.toml:8: [keys]: There is no action "mode.nxt".',
        f"\n  {paths.config_file()}\n  mode.nxt = 'f8'",
    ):
        assert words in outcome.err


def test_what_another_check_refuses_is_said_once(run: Run) -> None:
    files.write(paths.config_file(), b"[ui]\ntheme = 1\n[keys]\nquit = 2\n")
    outcome = run("config", "validate")
    assert outcome.err.count("config.toml") == 4, "two places with two paths"


def test_variables_without_effect_are_told_with_the_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAT_FOO", "1")
    outcome = run("config", "show")
    assert outcome.code == 0
    assert "KVCHAT_FOO" in outcome.err
