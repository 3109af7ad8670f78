"""The start of the application: what it takes from the terminal and the environment."""

import sys
from dataclasses import replace

import pytest

from kvchat import files, paths
from kvchat.cli import chat
from kvchat.cli.chat import replay
from kvchat.config import sources
from kvchat.errors import UsageError
from kvchat.tui import app
from kvchat.tui.plain import chat as plain
from kvchat.tui.state import AppConfig


@pytest.mark.parametrize(("chosen", "theme"), [("kvchat-light", "kvchat-light"), ("", "kvchat-ansi")])
def test_the_terminal_decides_the_theme_if_not_configured(monkeypatch, tmp_path, chosen, theme):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(chat, "prefers_lines", lambda: False)
    monkeypatch.setattr(app, "run", lambda config: started.append(config) or 0)
    started: list[AppConfig] = []
    origins = {("ui", "theme"): "config.toml:1"} if chosen else {}
    resolved = replace(sources.resolve(), origins=origins)
    assert (
        chat.start(AppConfig(log_file=tmp_path / "log", theme=chosen or "kvchat-dark", resolved=resolved), False) == 0
    )
    assert started[0].theme == theme


@pytest.mark.parametrize(
    ("arguments", "terminal", "variables", "is_plain"),
    [
        ([], True, {}, False),
        (["chat"], True, {}, False),
        (["chat", "--plain"], True, {}, True),
        (["--plain"], True, {}, True),
        ([], False, {}, True),
        ([], True, {"TERM": "dumb"}, True),
        (["chat"], True, {"ACCESSIBLE": "1"}, True),
        ([], True, {"ACCESSIBLE": "0"}, False),
    ],
)
def test_line_mode_is_used_if_no_screen_can_be_drawn(run, monkeypatch, arguments, terminal, variables, is_plain):
    monkeypatch.setattr(app, "run", lambda _config: 7)
    monkeypatch.setattr(plain, "run", lambda _config: 8)
    monkeypatch.setattr(chat, "_is_terminal", lambda _stream: terminal)
    monkeypatch.delenv("ACCESSIBLE", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    assert run(*arguments).code == (8 if is_plain else 7)


@pytest.mark.parametrize("redirected", ["stdin", "stdout", "stderr"])
def test_line_mode_is_used_if_a_stream_is_redirected(monkeypatch, redirected):
    monkeypatch.setattr(chat, "_is_terminal", lambda stream: stream is not getattr(sys, redirected))
    monkeypatch.delenv("ACCESSIBLE", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert chat.prefers_lines()


def test_the_application_gets_the_settings(run, monkeypatch):
    started: list[AppConfig] = []
    monkeypatch.setattr(app, "run", lambda config: started.append(config) or 7)
    monkeypatch.setattr(chat, "_is_terminal", lambda _stream: True)
    monkeypatch.setenv("TERM", "xterm")
    files.write(paths.config_file(), b'[keys]\nmode.next = "f12"\n')
    assert run("--mode", "speculative", "--budget", "256", "--theme", "x", "--system", "Short.").code == 7
    config = started[0]
    assert (config.load.mode, config.load.given) == ("speculative", {})
    assert config.load.mode_params["speculative"] == config.load.mode_params["streaming"] == {"budget": 256}
    assert (config.theme, config.system, config.keys) == ("x", "Short.", {"mode.next": "f12"})
    assert (config.log_file, config.history_file) == (paths.log_file(), paths.history_file())
    assert config.resolved.origins["ui", "theme"] == "--theme"


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("no", False)])
def test_a_screen_needs_a_unicode_encoding(encoding, can):
    class Stream:
        def __init__(self):
            self.encoding = encoding

    assert chat._draws(Stream()) is can


@pytest.mark.parametrize(
    ("prompt", "piped"), [("Sum up", "File stdin:\n```\na\nb\n```"), ("", ""), ("/stats", ""), (" ", "")]
)
def test_piped_text_is_attached_only_to_a_question(monkeypatch, prompt, piped):
    monkeypatch.setattr(chat, "piped", lambda: b"a\nb\n")
    monkeypatch.setattr(chat, "start", lambda config, plain: started.append(config) or 0)
    started: list[AppConfig] = []
    assert chat.chat(sources.SettingsSource(), resume=False, plain=False, prompt=prompt) == 0
    assert (started[0].prompt, started[0].piped) == (prompt, piped)


# ---- kvchat replay


def test_an_invalid_recording_is_refused_before_the_screen_starts(tmp_path):
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(UsageError, match="not a kvchat recording"):
        replay(tmp_path / "notes.txt", plain=True)
