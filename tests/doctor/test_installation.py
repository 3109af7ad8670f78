"""kvchat's own files: settings, the bundled model and the data folder, good and broken."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

from kvchat import paths
from kvchat.doctor import installation
from kvchat.doctor.installation import Check


def test_wrong_settings_are_a_problem_and_a_missing_file_is_none():
    check, device = installation.settings()
    assert (check.state, device) == ("ok", "auto")
    assert check.found.startswith(str(paths.config_file()))
    paths.config_file().parent.mkdir(parents=True)
    paths.config_file().write_text('[model]\ndevice = "cpu"\n')
    assert installation.settings()[1] == "cpu"
    paths.config_file().write_text('[model]\ndevise = "cpu"\n')
    check, _ = installation.settings()
    assert (check.state, "devise" in check.advice) == ("problem", True)


def test_a_variable_without_effect_is_looked_at(monkeypatch):
    assert installation.environment().state == "ok"
    monkeypatch.setenv("KVCHAT_DATADIR", "/data")
    check = installation.environment()
    assert (check.state, "KVCHAT_DATADIR" in check.found, "KVCHAT_DATA_DIR" in check.advice) == ("warning", True, True)


def test_the_bundled_model_is_opened(tmp_path, monkeypatch):
    assert installation.bundled_model() == Check("bundled model", "ok", f"{paths.bundled_model_dir()}, 75 tensors")
    monkeypatch.setattr(paths, "bundled_model_dir", lambda: tmp_path)
    assert installation.bundled_model().state == "problem"
    (tmp_path / "config.json").write_text("{}")
    for content in (b"", struct.pack("<Q", 100) + b"{", b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert installation.bundled_model().state == "problem"


def test_a_full_disk_and_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path / "not" / "yet")
    assert installation.data_folder().state == "ok"
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
        assert "Make room" in installation.data_folder().advice
    monkeypatch.setattr(paths, "data_dir", lambda: Path("/dev/null/kvchat"))
    assert "KVCHAT_DATA_DIR" in installation.data_folder().advice


def test_the_package_is_found_where_it_lies():
    assert Path(installation.__file__).parents[1] == paths.PACKAGE
