"""``.ci/gpu`` is prepared for a day with a GPU: its commands are those of today, and no failure ends it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import typer

from kvchat.bench.frame import parsed
from kvchat.cli.main import app

SCRIPT = Path(__file__).parents[1] / ".ci" / "gpu"
# In place of Python: notes its arguments and fails.
NOTES = """#!/usr/bin/env bash
printf '%s\\t' "$@" >> "$NOTED"; echo >> "$NOTED"
exit 3
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The exit code, and the arguments of every part; each part fails."""
    folder = tmp_path_factory.mktemp("gpu")
    python, noted = folder / "python", folder / "noted"
    python.write_text(NOTES, encoding="utf-8")
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "NOTED": str(noted), "OUT": str(folder / "out")}
    code = subprocess.run([SCRIPT, "100000"], env=env, capture_output=True, check=False).returncode
    assert (folder / "out" / "results.tar").exists()
    return code, [line.split("\t")[:-1] for line in noted.read_text(encoding="utf-8").splitlines()]


def read(ran):
    """The commands of ``kvchat bench`` as the command line reads them: name and parameters."""
    bench = typer.main.get_command(app).commands["bench"]
    listed = [words[3:] for words in ran[1] if words[:3] == ["-m", "kvchat", "bench"]]
    return [(name, bench.commands[name].make_context(name, rest).params) for name, *rest in listed]


def test_every_part_runs_though_those_before_it_failed(ran):
    code, parts = ran
    assert code == 1
    assert ["-m", "kvchat", "doctor"] in parts
    assert parts[-1][-2:] == ["-k", "late"], "the last part of the script"


def test_what_no_time_is_left_for_is_left_out(tmp_path):
    env = os.environ | {"PYTHON": "false", "OUT": str(tmp_path)}
    assert subprocess.run([SCRIPT, "20", "decode", "long"], env=env, capture_output=True, check=False).returncode == 0
    assert (tmp_path / "summary.txt").read_text() == "left out: decode-32k\nleft out: decode-128k\n"


def test_every_measurement_has_options_of_today_and_a_file_of_its_own(ran):
    commands = read(ran)
    for _, given in commands:
        asked = given.get("mode") or "full"
        assert all(parsed(variant) for variant in (asked if isinstance(asked, list) else [asked]))
    files = [given["out"].name for _, given in commands]
    assert len(set(files)) == len(files)
    assert all(name.startswith("gpu-") for name in files)


def test_it_measures_exact_over_the_link_packed_weights_and_8_bit_pages(ran):
    commands = read(ran)
    decode = [given for name, given in commands if name == "decode"]
    exact = [given["context"] for given in decode if any("full:resident=" in mode for mode in given["mode"])]
    assert exact == [[32_768], [131_072]]
    assert {given["quantize"] for given in decode} == {"none", "int8", "int4"}
    assert [name for name, given in commands if given.get("host_dtype") == "int8"] == ["agreement"]
