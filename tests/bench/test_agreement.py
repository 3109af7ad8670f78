"""The agreement benchmark: full agrees with itself, and divergence follows its formula."""

import json

import pytest
import torch

from kvchat.bench import agreement, coverage
from kvchat.bench.agreement import divergence
from kvchat.bench.external.baselines import as_written
from kvchat.bench.frame import Frame, ModelChoice, parsed
from kvchat.bench.report import tables
from kvchat.bench.settings import Agreement, Coverage
from kvchat.bench.texts import passages
from kvchat.bench.walk import Walk


def test_divergence_matches_known_values():
    logits = torch.tensor([0.3, -1.0, 2.0])
    assert divergence(logits, logits + 5) == pytest.approx(0, abs=1e-9)
    half, quarter = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert divergence(half, quarter) == pytest.approx(0.5 * torch.tensor(4 / 3).log().item(), abs=1e-6)


def test_full_agrees_with_itself_and_streaming_covers_less():
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
    assert full["kl_99"] is None, "12 tokens are too few for a 99th percentile"
    assert (len(result["rows"][0]["covered"]), len(result["rows"][1]["kl"])) == (8, 12)


def test_full_has_the_models_perplexity_and_streaming_more(bundled):
    settings = Agreement(("full", "streaming:budget=64,sink=4"), 16, 150, 1)
    result = agreement.run(settings, ModelChoice(device="cpu"))
    full, streaming = result["summary"]
    assert full["perplexity"] == pytest.approx(full["perplexity_full"], rel=1e-4)
    assert streaming["perplexity_full"] == full["perplexity_full"]
    assert streaming["perplexity"] > full["perplexity"]
    assert streaming["read_mean"] < 0.95 * full["read_mean"]
    ids = torch.tensor([passages((), 166, bundled.tokenizer)[0].ids])
    with as_written(bundled.model):
        logits = bundled.model(ids, use_cache=False).logits[0, 15:-1].float()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 16:])
    assert result["rows"][0]["nats_mean"] == pytest.approx(float(nats), rel=1e-3)


# ---- ``bench coverage``: the share of weights on what each mode reads, next to the best selections


PROMPT = [token % 251 for token in range(7, 407)]
BOTH = Coverage(("streaming:budget=128", "full", "speculative:budget=128"), 300, 3, passages=1, facts=1)


def test_coverage_rows_average_over_the_steps(tiny_shape):
    walk = Walk(tiny_shape)
    text = coverage.Forced("books", PROMPT[:390], PROMPT[390:394])
    found = coverage.row(walk, text, parsed("streaming:budget=64,sink=4"))
    walk.begin(text.prompt, parsed("streaming:budget=64,sink=4"))
    shares = []
    for token in text.tokens:
        walk.step(token)
        weights = [walk.weights(layer).mean(1) for layer in range(4)]
        shares.append(torch.stack([(w * walk.attended(layer)).sum(-1) for layer, w in enumerate(weights)]))
    assert torch.tensor(found["covered"]) == pytest.approx(torch.stack(shares).mean(0), abs=1e-4)
    assert torch.tensor(found["least"]) == pytest.approx(torch.stack(shares).amin(0), abs=1e-4)
    assert found["along"] == pytest.approx([float(each.mean()) for each in shares], abs=1e-4)
    covered, pages, tokens = (torch.tensor(found[name]) for name in ("covered", "best_pages", "best_tokens"))
    assert bool((tokens >= pages).all() and (tokens >= covered).all())
    assert found["steps"] == 4


@pytest.mark.slow("the bundled model decodes two texts in three modes")
def test_coverage_has_a_row_for_every_text_and_variant():
    result = coverage.run(BOTH, ModelChoice("bundled", "cpu", "float32"), Frame(report=lambda line: None))
    rows = {(row["kind"], row["variant"]): row for row in result["summary"]}
    assert len(rows) == 6
    for (_kind, variant), row in rows.items():
        if variant == "full":
            assert row["covered"] == row["best_tokens"] == row["best_pages"] == pytest.approx(1, abs=1e-4)
        else:
            assert row["worst_covered"] < row["covered"] < row["best_tokens"] < 1
            assert row["read_mean"] < 300
            assert row["worst_covered"] <= row["worst_best_tokens"]
    (table,) = tables(json.loads(json.dumps(result)))
    assert "layer" in table.markdown()
