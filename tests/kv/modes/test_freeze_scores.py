"""Freeze's relevance scores against products computed a second time; shares of attention are in the references."""

from __future__ import annotations

import torch
from support.freeze_run import LAYERS, FreezeRun


def test_products_can_be_the_score():
    run = FreezeRun(profile="paper", score="raw", tau=1.0, k=0.5)
    run.prefill(60)
    run.step()
    scores = run.kv.mode.timers.score[:61]
    expected = torch.stack([(run.query[i] @ run.keys[i].transpose(1, 2)).abs().mean((0, 1)) for i in range(LAYERS)])
    assert torch.allclose(scores, expected.mean(0), atol=1e-5)
    assert run.active() == {j for j in range(61) if scores[j] >= 1.0 or j > 60 - 32}
