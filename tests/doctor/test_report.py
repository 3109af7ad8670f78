"""kvchat doctor: the whole report on this machine, and kvchat's own checks."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvchat import paths
from kvchat.doctor import report
from kvchat.doctor.machine import Check

COLORS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


@pytest.fixture
def found(monkeypatch) -> list[Check]:
    """The report is these checks."""
    found: list[Check] = []
    monkeypatch.setattr(report, "checks", lambda: iter(found))
    return found


def test_a_line_a_check_with_what_to_do(found, capsys):
    found += [Check("torch", "ok", "2.9"), Check("pinning", "warning", "refused", "ulimit -l unlimited")]
    assert report.doctor(as_json=False) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "✓ ok       torch         2.9",
        "! warning  pinning       refused",
        "                         → ulimit -l unlimited",
        "",
        "kvchat can run; 1 to look at.",
    ]
    found.append(Check("torch", "problem", "gone"))
    assert report.doctor(as_json=False) == 1
    assert "kvchat cannot run: 1 to solve first." in capsys.readouterr().out


def test_as_json(found, capsys):
    found += [Check("device", "problem", "cuda is set, torch sees no GPU", "…")]
    assert report.doctor(as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "usable": False,
        "checks": [{"name": "device", "state": "problem", "found": "cuda is set, torch sees no GPU", "advice": "…"}],
    }


def test_this_machine(tmp_path):
    command = [sys.executable, "-m", "kvchat", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(result.stdout)
    assert (result.returncode, report["usable"], result.stderr) == (0, True, "")
    names = [check["name"] for check in report["checks"]]
    for name in ("torch", "driver", "pinning", "decode steps", "container", "NUMA", "bundled model", "terminal"):
        assert name in names


def test_wrong_settings_are_a_problem_and_a_missing_file_is_none():
    check, device = report.configuration()
    assert (check.state, device) == ("ok", "auto")
    assert check.found == f"{paths.config_file()} (not there; the defaults hold)"
    paths.config_file().parent.mkdir(parents=True)
    paths.config_file().write_text('[model]\ndevice = "cpu"\n')
    assert report.configuration()[1] == "cpu"
    paths.config_file().write_text('[model]\ndevise = "cpu"\n')
    check, _ = report.configuration()
    assert (check.state, "devise" in check.advice) == ("problem", True)


def test_the_bundled_model_is_opened(tmp_path):
    assert report.bundled_model() == Check("bundled model", "ok", f"{paths.bundled_model_dir()}, 75 tensors")
    assert report.bundled_model(tmp_path).state == "problem"
    (tmp_path / "config.json").write_text("{}")
    for content in (b"", struct.pack("<Q", 100) + b"{", b"\xff" * 50):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert report.bundled_model(tmp_path).state == "problem"


def test_a_full_disk_and_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    assert report.data_folder(tmp_path / "not" / "yet").state == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert "Make room" in report.data_folder(tmp_path).advice
    monkeypatch.setattr(report.os, "access", lambda path, mode: False)
    assert "KVCHAT_DATA_DIR" in report.data_folder(tmp_path).advice


@pytest.mark.parametrize(
    ("environ", "size", "state", "words"),
    [
        (COLORS, (80, 24), "ok", "80x24"),
        (COLORS, (80, 11), "warning", "80x11"),
        (COLORS, (39, 90), "warning", "39x90"),
        (COLORS | {"TERM": "dumb"}, (80, 24), "warning", "TERM=dumb"),
        ({}, (80, 24), "warning", "TERM=n/a COLORTERM=n/a"),
        ({"TERM": "screen"}, (80, 24), "ok", "approximated"),
    ],
)
def test_the_terminal(environ, size, state, words):
    check = report.terminal(environ, True, size)
    assert (check.state, words in check.found) == (state, True)


def test_without_a_terminal():
    assert report.terminal(COLORS, False).found.startswith("n/a")


def test_the_package_is_found_where_it_lies():
    assert Path(report.__file__).parents[1] == paths.PACKAGE
