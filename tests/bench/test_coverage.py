"""``bench coverage``: the shares are those of the weights over what each mode reads, beside the best choices."""

from __future__ import annotations

import json

import pytest
import torch

from kvchat.bench import coverage
from kvchat.bench.frame import Frame, ModelChoice, parsed
from kvchat.bench.report import tables
from kvchat.bench.settings import Coverage
from kvchat.bench.walk import Walk

PROMPT = [token % 251 for token in range(7, 407)]
BOTH = Coverage(("streaming:budget=128", "full", "speculative:budget=128"), 300, 3, passages=1, facts=1)


def test_shares_of_a_row_are_the_means_of_the_steps(tiny_shape):
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
def test_books_and_facts_have_a_row_for_every_variant():
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
