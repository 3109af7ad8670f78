from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import Run
from support.fake_session import FakeSession

import kvchat
from kvchat import files, paths
from kvchat.cli import chat
from kvchat.config.modes import registered
from kvchat.tui import actions, app
from kvchat.tui.config import AppConfig
from kvchat.tui.plain import chat as plain

# ---- the application -------------------------------------------------------------------------------


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
def test_lines_are_chosen_where_no_screen_can_be_drawn(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    terminal: bool,
    variables: dict[str, str],
    is_plain: bool,
) -> None:
    monkeypatch.setattr(app, "run", lambda _config: 7)
    monkeypatch.setattr(plain, "run", lambda _config: 8)
    monkeypatch.setattr(chat, "_is_terminal", lambda _stream: terminal)
    monkeypatch.delenv("ACCESSIBLE", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    assert run(*arguments).code == (8 if is_plain else 7)


def test_the_application_gets_the_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_options_before_a_command_are_refused(run: Run, session: FakeSession) -> None:
    outcome = run("--mode", "streaming", "ask", "hello")
    assert outcome.code == 2
    assert "kvchat ask --mode" in outcome.err


# ---- other commands --------------------------------------------------------------------------------


def test_modes_lists_all_with_parameters_and_defaults(run: Run) -> None:
    listed = {mode["name"]: mode for mode in json.loads(run("modes", "--json").out)}
    assert list(listed) == list(registered())
    defaults = {param["name"]: param["default"] for param in listed["speculative"]["params"]}
    assert defaults["tau"] == 0.8
    assert defaults["pin_system"] is False
    text = run("modes").out
    assert "tau        0.8" in text


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"kvchat {kvchat.__version__}\n", "")
    assert "ask" in run("-h").out


def test_locate_creates_nothing(run: Run, tmp_path: Path) -> None:
    out = run("locate").out
    assert str(paths.config_file()) in out
    assert "(not there yet)" in out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_settings_file_behind(run: Run, full_disk: None) -> None:
    outcome = run("config", "init")
    assert outcome.code == 2
    assert "cannot be written. No space left on device. Free space" in outcome.err
    assert not list(paths.config_dir().iterdir())


def test_config_init_show_validate_schema(run: Run) -> None:
    assert run("config", "validate").code == 0
    assert run("config", "init").out == f"{paths.config_file()}\n"
    assert run("config", "init").code == 2
    assert run("config", "validate") == (0, f"{paths.config_file()}: good\n", "")
    paths.config_file().write_text('[kv]\nmode = "streaming"\n')
    assert 'kv.mode = "streaming"   # config.toml:2' in run("config", "show").out
    assert "kv" in json.loads(run("config", "schema").out)["properties"]


def test_a_wrong_config_is_refused_with_its_line(run: Run, session: FakeSession, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[kv]\nmod = 1\n")
    assert run("config", "validate", str(other)).err.startswith("kvchat: other.toml:2: kv.mod: there is no such")
    assert run("config", "validate", str(tmp_path / "no")).code == 2
    assert run("config", "validate", str(paths.bundled_profiles_dir() / "8gb.toml")).code == 0
    other.write_text("[match]\nmemory = [7]\n")
    assert "match.memory.1: [7] is refused" in run("config", "validate", str(other)).err
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


def test_keys_lists_the_actions_with_the_keys_of_the_settings(run: Run) -> None:
    files.write(paths.config_file(), b'[keys]\nmode.next = "f12"\nexport = "f11"\n')
    listed = {row["id"]: row for row in json.loads(run("keys", "--json").out)}
    assert set(listed) == set(actions.BY_ID)
    assert (listed["mode.next"]["keys"], listed["mode.next"]["default_keys"]) == (["f12"], ["f6"])
    assert (listed["export"]["keys"], listed["export"]["can_be_changed"]) == (["f11"], True)
    row = next(line for line in run("keys").out.splitlines() if "mode.next " in line)
    assert row.split()[:3] == ["F12", "mode.next", "/next"]


@pytest.mark.parametrize(("encoding", "can"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("no", False)])
def test_a_screen_is_drawn_where_its_signs_can_be_written(encoding: str, can: bool) -> None:
    class Stream:
        def __init__(self) -> None:
            self.encoding = encoding

    assert chat._draws(Stream()) is can
