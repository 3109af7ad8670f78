"""A model whose layers are on two GPUs: what it computes, reads and takes is that of one."""

from __future__ import annotations

import pytest
import torch
from support.fake_cuda.device import gpu
from support.tiny_runner import PARAMS, loaded, mode_of, prefilled, same_steps, token_ids

from kvchat.engine.runner import ModelRunner
from kvchat.models import split
from kvchat.models.load import LoadedModel

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
