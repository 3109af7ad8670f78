"""The agreement benchmark: full agrees with itself, and divergence is what its formula says."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvchat.bench import agreement
from kvchat.bench.agreement import divergence
from kvchat.bench.beside.baselines import as_written
from kvchat.bench.frame import ModelChoice
from kvchat.bench.settings import Agreement
from kvchat.bench.texts import passages
from kvchat.cli.main import app
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


def test_divergence_is_zero_of_equal_distributions_and_known_of_others():
    logits = torch.tensor([0.3, -1.0, 2.0])
    assert divergence(logits, logits + 5) == pytest.approx(0, abs=1e-9)
    half, quarter = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert divergence(half, quarter) == pytest.approx(0.5 * torch.tensor(4 / 3).log().item(), abs=1e-6)


def test_full_agrees_with_itself_and_less_reading_covers_less():
    modes = ("full", "streaming:budget=64,sink=4")
    settings = Agreement(modes, context=200, tokens=12, passages=1)
    result = agreement.run(settings)
    assert json.loads(json.dumps(result)) == result
    full, streaming = result["summary"]
    assert (full["kl_mean"], full["same_top"], full["decoded"]) == (0, 1, 12)
    assert full["covered"] == pytest.approx(1, abs=1e-4)
    assert streaming["kl_mean"] > 0
    assert streaming["covered_least"] < streaming["covered"] < 0.99
    assert full["read_mean"] == pytest.approx(200 + 13 / 2)
    assert streaming["read_mean"] <= 128
    assert full["kl_99"] is None, "12 tokens say nothing of 1 %"
    assert (len(result["rows"][0]["covered"]), len(result["rows"][1]["kl"])) == (8, 12)


def test_perplexity_of_full_is_the_models_own_and_less_reading_costs_some():
    settings = Agreement(("full", "streaming:budget=64,sink=4"), 16, 150, 2, joined=False)
    result = agreement.run(settings, ModelChoice(device="cpu"))
    full, streaming = result["summary"]
    assert full["perplexity"] == pytest.approx(full["perplexity_full"], rel=1e-4)
    assert streaming["perplexity_full"] == full["perplexity_full"]
    assert streaming["perplexity"] > full["perplexity"]
    assert streaming["read_mean"] < 0.95 * full["read_mean"]
    model = load_model(Load("bundled", "cpu"), lambda stage: None)
    ids = torch.tensor([passages((), 166, model.tokenizer)[0].ids])
    with as_written(model.model):
        logits = model.model(ids, use_cache=False).logits[0, 15:-1].float()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 16:])
    assert result["rows"][0]["nats_mean"] == pytest.approx(float(nats), rel=1e-3)


def test_a_text_that_is_too_short_is_refused_by_the_command(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    ran = CliRunner().invoke(app, ["bench", "agreement", "--text", str(text)])
    assert "too short to measure on" in str(ran.exception)
