from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvchat import paths


def test_the_users_folders_come_from_platformdirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVCHAT_CONFIG")
    monkeypatch.delenv("KVCHAT_DATA_DIR")
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    assert paths.config_file() == tmp_path / "CONFIG/kvchat/config.toml"
    assert paths.user_themes_dir() == tmp_path / "CONFIG/kvchat/themes"
    assert paths.data_dir() == tmp_path / "DATA/kvchat"
    assert paths.log_file().parent == paths.history_file().parent == tmp_path / "STATE/kvchat"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "CACHE"))
    assert paths.models_dir() == tmp_path / "CACHE/kvchat/models"


def test_the_environment_moves_settings_and_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "mine.toml"))
    monkeypatch.setenv("KVCHAT_DATA_DIR", "~/there")
    assert paths.config_file() == tmp_path / "mine.toml"
    assert paths.user_themes_dir() == tmp_path / "themes"
    assert paths.data_dir() == paths.state_dir() == Path.home() / "there"


def test_the_bundled_model_and_themes_are_there() -> None:
    assert (paths.bundled_model_dir() / "model.safetensors").is_file()
    assert paths.bundled_themes_dir().is_dir()


def test_asking_for_a_path_creates_nothing(tmp_path: Path) -> None:
    paths.log_file(), paths.history_file(), paths.data_dir(), paths.config_file()
    assert list(tmp_path.iterdir()) == []


def test_a_named_model_lies_in_the_cache_or_in_a_package_that_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = paths.NAMED["smollm2"]
    assert paths.named_model("smollm2") is None
    assert paths.named_model("nothing") is None
    site, package = tmp_path / "site", named.package.replace("-", "_")
    for file, text in (
        (f"{package}/__init__.py", "raise SystemExit('imported')"),
        (f"{package}/{named.file}", "GGUF"),
        (f"{package}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {named.package}\nVersion: 1\n"),
        (f"{package}-1.dist-info/RECORD", f"{package}/__init__.py,,\n{package}/{named.file},,\n"),
    ):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    monkeypatch.syspath_prepend(site)
    assert paths.named_model("smollm2") == site / package / named.file
    paths.models_dir().mkdir(parents=True)
    (paths.models_dir() / named.file).write_text("GGUF")
    assert paths.named_model("smollm2") == paths.models_dir() / named.file


def test_the_version_names_the_commit_of_a_checkout(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "kvchat")
    assert paths.with_commit("1.2") == "1.2"
    subprocess.run([*git, "init", "-q"], check=True)
    assert paths.with_commit("1.2") == "1.2"  # nothing is committed yet
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert paths.with_commit("1.2") == f"1.2 ({commit[:8]})"
    (tmp_path / "kvchat").mkdir()
    (tmp_path / "kvchat" / "commit.txt").write_text("0123456789abcdef\n")
    assert paths.with_commit("1.2").endswith("(01234567)")
