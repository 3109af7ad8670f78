"""The recall benchmark: full is always beside the variants, places add up, and bad input is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import recall
from kvchat.bench.recall import Settings
from kvchat.bench.recall_tasks import TASKS
from kvchat.cli.main import app
from kvchat.errors import UsageError


def test_what_full_finds_streaming_loses_and_the_command_goes_on(tmp_path):
    out = tmp_path / "recall.json"
    words = "--task passkey --task name --length 300 --depth 0.2 --cases 1 --mode streaming:sink=4 --budget 64"
    arguments = ["bench", "recall", *words.split(), "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "| streaming, sink=4, budget=64 | 0 of 1 (0 – 79 %) |" in ran.stdout
    result = json.loads(out.read_text())
    assert [(row["task"], row["variant"], row["right"], row["cases"]) for row in result["summary"]][:2] == [
        ("passkey", "full", 1, 1),
        ("passkey", "streaming:sink=4,budget=64", 0, 1),
    ]
    assert {row["depth"] for row in result["rows"] if row["task"] == "name"} == {0.0}
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout) == result
    assert "4 of 4 measured before" in again.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings((), tasks=("passkeys",)), 'Did you mean "passkey"'),
        (Settings((), depths=(1.5,)), "depth 1.5 is refused"),
        (Settings((), keys=1), "1 keys are refused"),
        (Settings(("fulll",)), 'no KV mode "fulll"'),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(settings, message):
    with pytest.raises(UsageError, match=message):
        recall.run(settings)


def test_the_help_names_every_task():
    named = CliRunner().invoke(app, ["bench", "recall", "--help"]).stdout
    assert {task for task in TASKS if task not in named} == set()
