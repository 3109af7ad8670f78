from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from support.command_line import Run
from support.fake_session import FakeSession
from support.message import lacks

import kvchat
from kvchat import paths


def test_options_before_a_command_are_refused(run: Run, session: FakeSession) -> None:
    outcome = run("--mode", "streaming", "ask", "hello")
    assert outcome.code == 2
    assert "kvchat ask --mode" in outcome.err


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"kvchat {paths.with_commit(kvchat.__version__)}\n", "")
    assert "ask" in run("-h").out


def test_locate_creates_nothing(run: Run, tmp_path: Path) -> None:
    out = run("locate").out
    assert str(paths.config_file()) in out
    assert "(not there yet)" in out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_settings_file_behind(run: Run, full_disk: None) -> None:
    outcome = run("config", "init")
    assert outcome.code == 2
    assert not lacks(outcome.err, str(paths.config_file()), os.strerror(errno.ENOSPC))
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
