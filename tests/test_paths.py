from __future__ import annotations

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
