"""FreeKV's ablations: what each pooling prefers, and that the layer below is asked where it is the source."""

from __future__ import annotations

import pytest
import torch

from kvchat.bench.frame import parsed
from kvchat.bench.paper.freekv import POOLED, AblatedParameters
from kvchat.bench.walk import Walk
from kvchat.kv.ops.selection import Candidates, top_pages

PROMPT = [token % 251 for token in range(7, 807)]
# Two query heads; page 0 is beyond the candidates. Page 1 is strong in one head, page 2 fair in both, page 3 in the
# other head only, where all logits are low.
SCORES = torch.tensor([[[99.0, 6.0, 4.8, 1.0], [99.0, -9.0, -2.5, -2.0]]])


@pytest.mark.parametrize(("pooling", "best"), [("MeanS", 1), ("MaxS", 1), ("MeanQK", 2), ("MaxQK", 1)])
def test_each_pooling_chooses_by_its_own_rule(pooling, best):
    candidates = Candidates.between(1, torch.tensor(3), 4)
    pooled = POOLED[pooling](SCORES, candidates)
    assert top_pages(pooled, candidates.masked, 1).tolist() == [[best]]


def test_the_maximum_of_weights_ranks_a_page_by_its_best_head():
    """Page 3 has half the weight of one head, page 2 a third of both: the mean prefers 2, the maximum 3."""
    weights = torch.tensor([[[0.0, 0.5, 0.45, 0.05], [0.0, 0.01, 0.44, 0.55]]])
    candidates = Candidates.between(1, torch.tensor(3), 4)
    order = {
        pooling: top_pages(POOLED[pooling](weights.log(), candidates), candidates.masked, 3).tolist()
        for pooling in ("MeanS", "MaxS")
    }
    assert order == {"MeanS": [[2, 3, 1]], "MaxS": [[3, 1, 2]]}


def attended(walk, parameters):
    """The sets that three decoded tokens read."""
    walk.begin(PROMPT, parameters)
    found = []
    for token in (9, 40, 77):
        walk.step(token)
        found.append(torch.stack([walk.attended(layer) for layer in range(walk.model.layers)]))
    return torch.cat(found, -1)


def test_what_is_not_replaced_is_speculative_mode(tiny_shape):
    walk = Walk(tiny_shape)
    budget = {"budget": 192, "tau": 0.8}
    plain = attended(walk, parsed("speculative:budget=192,tau=0.8"))
    assert torch.equal(attended(walk, AblatedParameters(**budget)), plain)
    assert not torch.equal(attended(walk, AblatedParameters(**budget, pooling="MaxQK")), plain)


def test_the_layer_below_is_asked_at_the_same_step(tiny_shape, monkeypatch):
    """Every layer but the first is given the query that the layer below it had."""
    from kvchat.kv.modes.freekv import FreeKV

    given, begin = [], FreeKV.attention_begin
    monkeypatch.setattr(
        FreeKV,
        "attention_begin",
        lambda self, layer, query, key, spec: given.append(query.clone()) or begin(self, layer, query, key, spec),
    )
    walk = Walk(tiny_shape)
    walk.begin(PROMPT, AblatedParameters(budget=192, tau=2, source="layer below"))
    given.clear()
    walk.step(9)
    own = list(walk.queries)
    assert torch.allclose(given[0].float(), own[0])
    assert all(torch.allclose(asked.float(), below) for asked, below in zip(given[1:], own, strict=False))
