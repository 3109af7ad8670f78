"""Where rows are kept without --out, and what a result says it was made by."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from kvchat import paths
from kvchat.bench import long_run
from kvchat.cli import bench
from kvchat.cli.main import app
from kvchat.errors import UsageError


def test_without_a_file_rows_are_kept_until_the_result_is_complete(monkeypatch):
    kept = []
    folder = paths.state_dir() / "bench"

    def interrupted(settings, choice, frame):
        kept.append(frame.file)
        frame.file.parent.mkdir(parents=True)
        frame.file.write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(long_run, "run", interrupted)
    arguments = ["bench", "long-run", "--tokens", "10", "--json"]
    CliRunner().invoke(app, arguments)
    assert [path.parent for path in kept] == [folder]
    assert kept[0].is_file()
    monkeypatch.setattr(long_run, "run", lambda settings, choice, frame: kept.append(frame.file) or {"rows": []})
    ran = CliRunner().invoke(app, arguments)
    assert json.loads(ran.stdout) == {"rows": []}
    assert kept[1] == kept[0]
    assert not list(folder.iterdir())
    CliRunner().invoke(app, [*arguments, "--dtype", "bfloat16"])
    assert kept[2] != kept[0], "another measurement has a file of its own"


def test_a_folder_is_no_file_to_keep_rows_in(tmp_path):
    ran = CliRunner().invoke(app, ["bench", "recall", "--model", "none", "--out", str(tmp_path)])
    assert isinstance(ran.exception, UsageError)
    assert "is a folder. Give --out the name of a file" in str(ran.exception)


@pytest.mark.parametrize(
    "where", [["--out", "a.json", "--json"], ["--out=a.json"], ["--plot", "b.svg", "--out", "a.json"]]
)
def test_a_result_names_its_command_without_where_it_was_kept(where, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvchat", "bench", "recall", *where, "--mode", "sync:m=5"])
    assert bench._command(sys.argv[1:]) == "kvchat bench recall --mode sync:m=5"
