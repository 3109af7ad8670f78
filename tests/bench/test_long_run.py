"""The long generation: its rows, and the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.cli.main import app


def test_memory_is_flat_once_the_budget_is_full():
    arguments = ["bench", "long-run", "--tokens", "300", "--budget", "64", "--json"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)["rows"]
    assert [row["stored"] for row in rows] == [64 + 30 * tenth for tenth in range(1, 11)]
    assert len({row["kv_device_bytes"] for row in rows[3:]}) == 1
    assert all(row["finite"] and row["read"] <= 64 + 64 for row in rows)
    assert "364 tokens stored" in ran.stderr


@pytest.mark.parametrize("mode", ["full", "freeze:profile=paper"])
def test_a_mode_without_a_budget_runs_too(mode):
    ran = CliRunner().invoke(app, ["bench", "long-run", "--tokens", "10", "--mode", mode, "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["rows"][-1]["stored"] == 74
