"""Freeze's relevance scores against attention weights computed a second time."""

from __future__ import annotations

import pytest
import torch
from support.freeze_run import LAYERS, FreezeRun


@pytest.mark.parametrize("score", ["raw", "scaled"])
def test_products_can_be_the_score(score):
    run = FreezeRun(score=score, tau=1.0, min_active=0, sink=0, stagger=1, k=1.0)
    run.prefill(60)
    run.step()
    scores = run.kv.mode.timers[0].score[:61]
    expected = torch.stack([(run.query[i] @ run.keys[i].transpose(1, 2)).abs().mean((0, 1)) for i in range(LAYERS)])
    assert torch.allclose(scores, expected.mean(0), atol=1e-5)
    assert run.active() == {j for j in range(61) if scores[j] >= 1.0 or j > 60 - 32}


def test_the_keenest_head_of_any_layer_is_the_score_and_earlier_ones_count():
    """Two steps by hand: one that a single head wants stays, and what it scored before counts by ``smooth``."""
    run = FreezeRun(strength=2.0, min_active=0, stagger=1, tau=6.0, k=1.0, smooth=0.25, score="prob_max")
    run.prefill(80)
    before: dict[int, float] = {}
    for _ in range(6):
        read = run.active() | {run.kv.total}
        run.step()
        best = dict.fromkeys(read, 0.0)
        for layer in range(LAYERS):
            seen = sorted(read)
            logits = run.query[layer].double() @ run.keys[layer][:, seen].double().transpose(1, 2)
            highest = logits.softmax(-1).amax((0, 1)) * sum(j >= 4 for j in seen)
            best = {j: max(best[j], float(highest[i])) for i, j in enumerate(seen)}
        expected = {j: 0.75 * s + 0.25 * before[j] if j in before else s for j, s in best.items()}
        scores = run.kv.mode.timers[0].score
        assert torch.allclose(scores[sorted(read)].double(), torch.tensor([expected[j] for j in sorted(read)]).double())
        before |= {j: float(scores[j]) for j in read}
        kept = {j for j in read if expected[j] >= 6.0}
        assert kept <= run.active()
    assert len(run.active()) < run.kv.total
    run.check()
