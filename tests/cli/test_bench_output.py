"""Where rows are kept, and what a result says it was made by."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from kvchat.cli import bench
from kvchat.cli.main import app
from kvchat.errors import UsageError


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
