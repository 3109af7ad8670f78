"""A walk: reuses a stored prompt, and reports tokens read, coverage and queries."""

import pytest
import torch

from kvchat.bench.frame import parsed
from kvchat.bench.walk import Walk
from kvchat.errors import DoesNotFitError, UsageError

PROMPT = [token % 251 for token in range(7, 407)]
FULL = parsed("full")


@pytest.fixture
def walk(tiny_shape):
    return Walk(tiny_shape)


def test_a_stored_prompt_is_prefilled_only_once(walk, monkeypatch):
    read, prefill = [], walk.runner.prefill
    monkeypatch.setattr(walk.runner, "prefill", lambda ids: read.append(len(ids)) or prefill(ids))
    first = walk.begin(PROMPT, parsed("streaming:budget=64,sink=4"))
    after = walk.step(9)
    assert torch.allclose(walk.begin(PROMPT, FULL), first, atol=1e-4)
    exact = walk.step(9)
    assert not torch.allclose(exact, after, atol=1e-4)
    walk.begin(PROMPT[:-1], FULL)
    assert read == [400, 1, 399]
    assert torch.allclose(walk.step(PROMPT[-1]), first, atol=1e-4)


def test_full_covers_everything_and_streaming_its_window(walk):
    walk.begin(PROMPT, FULL)
    walk.step(9)
    assert walk.tokens_read() == walk.runner.kv.total == len(PROMPT) + 1
    assert torch.allclose(walk.covered(), torch.ones(4, 2))
    assert torch.allclose(walk.weights(1).sum(-1), torch.ones(2, 2))
    walk.begin(PROMPT, parsed("streaming:budget=64,sink=4"))
    walk.step(9)
    assert 64 <= walk.tokens_read() <= 64 + 64 + 1
    assert float(walk.covered().max()) < 0.6


def test_sync_needs_a_prompt_long_enough_to_calibrate(walk):
    walk.begin(PROMPT, parsed("sync:budget=132"))
    walk.step(9)
    assert walk.tokens_read() < walk.runner.kv.total
    with pytest.raises(UsageError, match="100 tokens are too few to calibrate"):
        Walk(walk.model).begin(PROMPT[:100], parsed("sync:budget=132"))


def test_texts_beyond_the_context_are_rejected(walk):
    with pytest.raises(DoesNotFitError, match=r"4,400 tokens are needed; .* reads 4,096"):
        walk.begin(PROMPT, FULL, 4000)
    walk.begin(PROMPT, parsed("streaming:budget=64,sink=4"), 4000)
    assert walk.runner.kv.total == len(PROMPT), "streaming can go beyond the context"
