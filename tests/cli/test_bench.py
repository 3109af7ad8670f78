"""Every option of a measurement's command reaches its settings."""

import sys
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from kvchat.bench import agreement, decode, prefill, recall
from kvchat.bench.frame import ModelChoice
from kvchat.cli import bench
from kvchat.cli.main import app
from kvchat.errors import UsageError


def settings_from(monkeypatch: pytest.MonkeyPatch, line: str, measurement: ModuleType) -> tuple[Any, ModelChoice]:
    """The settings and the model choice that a command ``line`` results in."""
    given: list[Any] = []
    monkeypatch.setattr(measurement, "run", lambda *args: given.extend(args) or {"rows": []})
    ran = CliRunner().invoke(app, ["bench", *line.split(), "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    settings, choice, _ = given
    return settings, choice


MODEL = "-m there --device cpu --dtype float16 --quantize int8"
CHOICE = ModelChoice("there", "cpu", "float16", quantize="int8")
# The measurement, its options, and the resulting settings.
COMMANDS = [
    (
        agreement,
        "agreement --mode full --context 300 --tokens 7 --passages 2 --host-dtype int8",
        {"modes": ("full",), "context": 300, "tokens": 7, "passages": 2},
    ),
    (
        recall,
        "recall --mode full --task all --length 99 --depth 0.3 --cases 5 --keys 6 --inside 8 --seed 7",
        {"modes": ("full",), "tasks": ("all",), "lengths": (99,), "depths": (0.3,), "cases": 5, "keys": 6}
        | {"inside": 8, "seed": 7},
    ),
    (
        decode,
        "decode --mode full --context 99 --budget 88 --change-rate 0.5 --steps 3 --rounds 2"
        " --baselines dynamic,static --shape tiny --prefill --load 4",
        {"modes": ("full",), "contexts": (99,), "budget": 88, "change_rates": ("0.5",), "steps": 3, "rounds": 2}
        | {"baselines": ("dynamic", "static"), "shape": "tiny", "prefill": True, "load": 4},
    ),
    (
        prefill,
        "prefill --length 99 --turn 8 --mode full --rounds 2 --shape tiny",
        {"lengths": (99,), "turn": 8, "mode": "full", "rounds": 2, "shape": "tiny"},
    ),
]
NAMES = [line.split()[0] for _, line, _ in COMMANDS]


@pytest.mark.parametrize(("measurement", "line", "settings"), COMMANDS, ids=NAMES)
def test_every_option_reaches_the_settings(monkeypatch, measurement, line, settings):
    actual, choice = settings_from(monkeypatch, f"{line} {MODEL}", measurement)
    assert {name: getattr(actual, name) for name in settings} == settings
    assert choice == replace(CHOICE, host_dtype="int8" if "--host-dtype" in line else "model")


@pytest.mark.parametrize(("measurement", "line"), [command[:2] for command in COMMANDS], ids=NAMES)
def test_without_options_the_measurements_own_settings_apply(monkeypatch, measurement, line):
    actual, choice = settings_from(monkeypatch, line.split()[0], measurement)
    own = {field.name: field.default for field in fields(actual) if field.name != "modes"}
    assert {name: getattr(actual, name) for name in own} == own
    assert choice == ModelChoice()


def test_budgets_apply_to_modes_that_name_none(monkeypatch):
    actual, _ = settings_from(monkeypatch, "recall --mode sync --mode sync:budget=64 --budget 99 --budget 128", recall)
    assert actual.modes == ("sync:budget=99", "sync:budget=128", "sync:budget=64")


def test_standard_modes_use_the_given_budget(monkeypatch):
    actual, _ = settings_from(monkeypatch, "recall --budget 99", recall)
    assert actual.modes == ("streaming:budget=99", "speculative:budget=99", "freeze", "sync:budget=99")
    actual, _ = settings_from(monkeypatch, "agreement", agreement)
    assert actual.modes == ("streaming:budget=512", "speculative:budget=512", "freeze", "sync:budget=512")


@pytest.mark.parametrize("command", ["agreement", "coverage", "recall", "decode", "prefill", "peers", "paper freekv"])
@pytest.mark.parametrize("options", ["--mode fulll", "--mode sync:budget=1", "--mode sync:m"])
def test_invalid_variants_are_rejected_before_importing_torch(monkeypatch, command, options):
    monkeypatch.setattr(bench, "import_module", lambda name: pytest.fail("imported"))
    ran = CliRunner().invoke(app, ["bench", *command.split(), *options.split()])
    assert isinstance(ran.exception, UsageError)


# ---- The result file, and the command that a result records


@pytest.mark.parametrize(
    ("place", "reason"), [("", "is a folder. Use a file name for --out"), ("no/x.json", "There is no folder")]
)
def test_an_unwritable_result_file_is_refused_before_measuring(place, reason, tmp_path):
    ran = CliRunner().invoke(app, ["bench", "recall", "--model", "none", "--out", str(tmp_path / place)])
    assert isinstance(ran.exception, UsageError)
    assert reason in str(ran.exception)


@pytest.mark.parametrize("where", [["--out", "a.json", "--json"], ["--out=a.json"]])
def test_a_result_records_its_command_without_output_options(where, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvchat", "bench", "recall", *where, "--mode", "sync:m=5"])
    assert bench._command(sys.argv[1:]) == "kvchat bench recall --mode sync:m=5"
