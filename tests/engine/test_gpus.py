"""A model whose layers are on two GPUs: what it computes, reads and takes is that of one."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.fake_cuda.device import gpu
from support.tiny_runner import PARAMS, Wordless, loaded, mode_of, prefilled, runner_of, same_steps, token_ids

from kvchat.engine.runner import ModelRunner
from kvchat.models import attention_hook, split
from kvchat.models.load import LoadedModel, wrap

pytestmark = [pytest.mark.cuda, pytest.mark.fake_cuda]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setattr(gpu, "count", 2)


def halves(name: str = "llama", **changes) -> LoadedModel:
    """A tiny model with its first half on the first GPU."""
    return loaded(name, "cuda:0", places=(FIRST, FIRST, SECOND, SECOND), **changes)


@pytest.mark.parametrize("row", PARAMS)
def test_each_mode_computes_and_reads_the_same(row):
    one, two = (ModelRunner(model, mode_of(model, row)) for model in (loaded("llama", "cuda:0"), halves()))
    ids = token_ids(150)
    assert torch.equal(prefilled(one, ids), prefilled(two, ids))
    same_steps(one, two, token_ids(3, seed=1))


def test_a_query_is_estimated_ahead_across_the_border(monkeypatch):
    monkeypatch.setattr(attention_hook, "CLOSE", -1.0)  # of random weights no estimate is close
    one, two = (
        runner_of(model, "speculative", budget=96, sink=4, window=32) for model in (loaded("llama", "cuda:0"), halves())
    )
    asked = [[], []]
    for each, layers in zip((one, two), asked, strict=True):
        assert attention_hook.install(each.model.model) == {1, 2, 3}
        choose = each.kv.mode.estimated
        each.kv.mode.estimated = lambda layer, query, choose=choose, layers=layers: (
            layers.append((layer, query.device)),
            choose(layer, query),
        )
        prefilled(each, token_ids(150))
    same_steps(one, two, token_ids(2, seed=1))
    assert asked[0] == asked[1] == [(layer, FIRST) for layer in (1, 2, 3)] * 2


def test_a_model_that_is_fused_computes_the_same():
    model, plain = (tiny_models.fresh("llama", num_hidden_layers=2) for _ in range(2))
    split.move(model, FIRST, (FIRST, SECOND))
    split.connect(model, FIRST, (FIRST, SECOND))
    one, two = (
        runner_of(each) for each in (wrap(plain.to(FIRST), Wordless(), "llama"), wrap(model, Wordless(), "llama"))
    )
    assert one.model.fused == two.model.fused != ""
    assert torch.equal(prefilled(one, token_ids(20)), prefilled(two, token_ids(20)))
    same_steps(one, two, token_ids(2, seed=1))
