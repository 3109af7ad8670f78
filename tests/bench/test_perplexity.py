"""The perplexity benchmark: its passages, full against itself, and what a mode that reads little shows."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from kvchat.bench import perplexity, report
from kvchat.bench.baselines import as_written
from kvchat.bench.frame import ModelChoice
from kvchat.bench.texts import passages
from kvchat.cli.main import app
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


@pytest.fixture(scope="module")
def model():
    return load_model(Load("bundled", "cpu"), lambda stage: None)


def test_full_is_the_models_own_perplexity_and_less_reading_costs_some(model):
    settings = perplexity.Settings(("streaming:budget=64,sink=4",), tokens=150, passages=2)
    result = perplexity.run(settings, ModelChoice(device="cpu"))
    assert json.loads(json.dumps(result)) == result
    full, streaming = result["summary"]
    assert (full["ratio"], full["read_share"], full["ratio_standard_error"]) == (1.0, 1.0, 0.0)
    assert full["read_end"] == perplexity.PROMPT + 150
    assert full["read_mean"] == pytest.approx(perplexity.PROMPT + 151 / 2)
    assert streaming["ratio"] > 1
    assert streaming["read_share"] < 0.95
    assert result["rows"][1]["dropped_at"], "prunes are kept"
    assert not result["rows"][0]["dropped_at"]
    passage = passages((), perplexity.PROMPT + 150, model.tokenizer)[0]
    ids = torch.tensor([passage.ids])
    with as_written(model.model):
        logits = model.model(ids, use_cache=False).logits[0, perplexity.PROMPT - 1 : -1].float()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, perplexity.PROMPT :])
    assert full["passages"][0]["perplexity"] == pytest.approx(float(nats.exp()), rel=1e-3)


def test_where_full_cannot_go_the_others_are_measured_by_themselves():
    row = {
        "passage": 0,
        "text": "long",
        "nats_mean": 2.0,
        "nats": [2.0],
        "read_mean": 64.0,
        "read_end": 64,
        "seconds": 1,
    }
    refused = {"passage": 0, "refused": "The context is full."}
    alone = perplexity._summary([refused], [row], "streaming")
    assert alone["perplexity"] == pytest.approx(math.exp(2))
    assert alone["passages"][0]["ratio"] is None
    assert "ratio" not in alone
    assert perplexity._summary([refused], [refused], "full") == {"variant": "full", "refused": "The context is full."}
    assert report.COLUMNS["perplexity"][2].cell(alone) == report.COLUMNS["perplexity"][5].cell(alone) == "n/a"


def test_the_command_reads_a_text_and_prints_one_json_object(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("The sea was calm, and the ship went on. " * 20, "utf-8")
    arguments = ["bench", "perplexity", "--text", str(text), "--tokens", "40", "--passages", "1", "--mode", "sync"]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0
    rows = json.loads(ran.stdout)["summary"]
    assert [row["variant"] for row in rows] == ["full", "sync"]
    assert rows[1]["passages"][0]["text"] == "mine"
    assert "[2/2] mine: sync" in ran.stderr
