"""A conversation taken up again: its rows and the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import model_shapes, resume
from kvchat.bench.frame import ModelChoice
from kvchat.bench.report import tables
from kvchat.bench.resume import Settings
from kvchat.cli.main import app
from kvchat.errors import DoesNotFitError, UsageError


@pytest.mark.parametrize("mode", ["full", "streaming"])
def test_it_comes_back_whole_from_memory_and_from_disk(mode):
    result = resume.run(Settings(200, 2, mode, 64), ModelChoice(device="cpu"))
    assert [row["way"] for row in result["rows"]] == ["prompt", "memory", "disk"] * 2
    read, *others = result["summary"]
    assert read["tokens"] > 200
    assert read["times_read"] == 1
    # The user's turn is what was asked for; the answer's beginning behind it is another with the next question.
    assert all(read["tokens"] - 8 <= row["tokens"] <= read["tokens"] for row in others)
    assert "| memory |" in tables(result)[0].markdown()


def test_the_command():
    ran = CliRunner().invoke(app, ["bench", "resume", "--tokens", "100", "--rounds", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    assert [row["way"] for row in json.loads(ran.stdout)["summary"]] == ["prompt", "memory", "disk"]
    assert "tokens from disk" in ran.stderr


def test_a_shape_reads_conversations_that_the_model_does_not():
    """``bundled-128k`` allows 131,072 tokens; few are read here."""
    arguments = ["bench", "resume", "--shape", "bundled-128k", "--device", "cpu", "--tokens", "150", "--rounds", "1"]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert [row["way"] for row in result["summary"]] == ["prompt", "memory", "disk"]
    assert result["settings"]["shape"] == "bundled-128k"
    assert model_shapes.SHAPES["bundled-128k"][1]["max_position_embeddings"] > 30_000


def test_a_shape_without_room_for_the_tokenizer_is_refused():
    with pytest.raises(UsageError, match=r"tiny.*reads no text.*256 tokens.*bundled-128k"):
        resume.run(Settings(100, 1, shape="tiny"), ModelChoice(device="cpu"))


def test_what_was_not_kept_is_said(monkeypatch):
    monkeypatch.setattr(resume, "ROOM", 1)
    with pytest.raises(DoesNotFitError, match=r"did not come back from memory.*Nothing of it was kept.*Free memory"):
        resume.run(Settings(100, 1), ModelChoice(device="cpu"))


def test_more_than_the_model_reads_is_refused():
    with pytest.raises(DoesNotFitError):
        resume.run(Settings(17_000, 1), ModelChoice(device="cpu"))
