"""Coverage is the share of dense attention in float64 that falls on what was read."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.dense_attention import softmax
from support.kv_run import Run
from support.mode_rows import FIRST, MIXED
from support.toy_model import toy

from kvchat.kv import coverage
from kvchat.kv.inspect import attended

WITHIN = 1e-5


def expected(run: Run, layer: int) -> torch.Tensor:
    """Shares of all stored tokens in float64, from the keys that the model projected: ``[H, total]``."""
    spec, total = run.toy.specs[layer], len(run.ids)
    seen = torch.arange(total) > total - 1 - (spec.window or total)
    by_query = softmax(run.query[layer], run.keys[layer], seen.expand(run.toy.geometry.kv_heads, -1), spec)
    shares = by_query.view(run.toy.geometry.kv_heads, -1, total).mean(1)
    return shares / shares.sum(-1, keepdim=True)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("row", FIRST.values())
def test_it_is_dense_attention_in_float64_over_what_was_read(row, unified, monkeypatch):
    monkeypatch.setattr(coverage, "CHUNK", 3)
    run = Run.of_row(row, toy(MIXED, kv_heads=4, group=3, page=8, unified=unified))
    run.prefill(150)
    for steps in (1, 6, 9):
        run.step(steps)
        for layer in range(len(MIXED)):
            shares, read = expected(run, layer), attended(run.kv.state, layer)
            covered = coverage.covered(run.kv.state, layer)
            assert (covered - (shares * read).sum(-1)).abs().max() < WITHIN
            assert (coverage.of_tokens(run.kv.state, layer) - shares).abs().max() < WITHIN
            assert torch.allclose(coverage.covered(run.kv.state, layer, slice(2, 3)), covered[2:3])
            reads_all = read.sum(-1) == (shares > 0).sum(-1)
            assert (covered[reads_all] - 1).abs().max() < WITHIN if reads_all.any() else covered.max() < 1


def test_full_covers_everything_and_streaming_its_window():
    run = Run.of_row("full", toy(MIXED, kv_heads=4, page=8))
    run.prefill(150)
    run.step()
    assert all(torch.allclose(coverage.covered(run.kv.state, layer), torch.ones(4)) for layer in range(len(MIXED)))
    run.switch("streaming", budget=64, sink=4)
    run.step()
    shares = expected(run, 0)
    assert coverage.covered(run.kv.state, 0).max() < 0.9
    assert coverage.covered(run.kv.state, 1).min() > 1 - WITHIN, "a window of 24 is within the budget"
    assert torch.allclose(coverage.of_tokens(run.kv.state, 0).double(), shares, atol=WITHIN)


@pytest.mark.parametrize("read", [0, 1, 2, 5, 8, 12])
def test_the_best_tokens_and_pages_are_those_of_a_search(read):
    shares = torch.rand((2, 10), generator=torch.Generator().manual_seed(read)).softmax(-1)
    number = torch.tensor([read, read])
    best = [max(map(sum, itertools.combinations(row.tolist(), min(read, 10)))) for row in shares]
    assert torch.allclose(coverage.of_best_tokens(shares, number), torch.tensor(best, dtype=torch.float32))
    pages = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    masses = torch.tensor([[float(row[list(page)].sum()) for page in pages] for row in shares])
    wanted = [max(map(sum, itertools.combinations(row.tolist(), min(read // 4, 3)))) for row in masses]
    wanted = wanted if read < 10 else [1.0, 1.0]
    assert torch.allclose(coverage.of_best_pages(shares, number, 4), torch.tensor(wanted, dtype=torch.float32))
