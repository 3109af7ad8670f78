"""The long generation: its rows, also those of two runs, and the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import long_run
from kvchat.bench.frame import Frame, ModelChoice, load
from kvchat.bench.long_run import Generation, Settings
from kvchat.bench.report import tables
from kvchat.cli.main import app
from kvchat.engine.session import Session
from kvchat.errors import DoesNotFitError

prefill, step = Session.prefill, Session.step


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


def test_an_interrupted_run_keeps_its_tenths_and_goes_on_from_them(tmp_path, monkeypatch):
    file, tenths = tmp_path / "long.json", Generation.tenth

    def interrupted(self, number, before):
        if number == 3:
            raise KeyboardInterrupt
        return tenths(self, number, before)

    settings = Settings(budget=64, tokens=200)
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "tenth", interrupted)
        with pytest.raises(KeyboardInterrupt):
            long_run.run(settings, ModelChoice(device="cpu"), Frame(file))
    kept = load(file)["rows"]
    assert [row["stored"] for row in kept] == [84, 104, 124]
    read = []
    monkeypatch.setattr(Session, "prefill", lambda self, ids: read.append(list(ids)) or prefill(self, ids))
    result = long_run.run(settings, ModelChoice(device="cpu"), Frame(file))
    assert result["rows"][:3] == kept
    assert [row["stored"] for row in result["summary"]] == [84 + 20 * tenth for tenth in range(10)]
    assert read[1][1:] == [token for row in kept for token in row["ids"]]
    assert len(read) == 2


def test_what_lies_beyond_the_context_is_refused_and_the_rest_kept(monkeypatch):
    monkeypatch.setattr(Session, "step", lambda self, token: refuse() if self.total == 75 else step(self, token))
    result = long_run.run(Settings("full", tokens=50), ModelChoice(device="cpu"))
    assert [row.get("stored") for row in result["summary"]] == [69, 74, *[None] * 8]
    assert "The context is full" in tables(result)[0].markdown()


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_more_tokens_than_the_context_are_refused_before_the_first(mode, monkeypatch):
    monkeypatch.setattr(Session, "prefill", lambda self, ids: pytest.fail("began"))
    with pytest.raises(DoesNotFitError, match=f"100,000,063 tokens are needed; bundled reads .* in {mode} mode"):
        long_run.run(Settings(mode, tokens=99_999_999), ModelChoice(device="cpu"))


def refuse():
    raise DoesNotFitError("The context is full.")
