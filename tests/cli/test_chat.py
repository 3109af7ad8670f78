"""The start of the application: what it takes from the terminal's surroundings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cli import chat
from kvchat.config import sources
from kvchat.tui import app as tui
from kvchat.tui.config import AppConfig


@pytest.mark.parametrize(
    ("chosen", "variable", "theme"),
    [("", "nord", "nord"), ("kvchat-light", "nord", "kvchat-light"), ("", "", "kvchat-ansi")],
)
def test_textuals_theme_counts_where_the_settings_name_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str, variable: str, theme: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TEXTUAL_THEME", variable)
    monkeypatch.setattr(chat, "prefers_lines", lambda: False)
    monkeypatch.setattr(tui, "run", lambda config: started.append(config) or 0)
    started: list[AppConfig] = []
    origins = {("ui", "theme"): "config.toml:1"} if chosen else {}
    resolved = replace(sources.resolve(), origins=origins)
    assert (
        chat.start(AppConfig(log_file=tmp_path / "log", theme=chosen or "kvchat-dark", resolved=resolved), False) == 0
    )
    assert started[0].theme == theme


@pytest.mark.parametrize(
    ("prompt", "piped"), [("Sum up", "File stdin:\n```\na\nb\n```"), ("", ""), ("/stats", ""), (" ", "")]
)
def test_what_is_piped_in_is_for_the_question_of_the_command_line_and_else_questions_by_lines(
    monkeypatch: pytest.MonkeyPatch, prompt: str, piped: str
) -> None:
    monkeypatch.setattr(chat.question, "piped", lambda: b"a\nb\n")
    monkeypatch.setattr(chat, "start", lambda config, plain: started.append(config) or 0)
    started: list[AppConfig] = []
    assert chat.chat(sources.SettingsSource(), resume=False, plain=False, prompt=prompt) == 0
    assert (started[0].prompt, started[0].piped) == (prompt, piped)
