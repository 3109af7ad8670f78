"""The sweep: its combinations, what is refused, and that its rows tell a good split of the budget from a bad one."""

from __future__ import annotations

import pytest

from kvchat.bench.summaries import tables
from kvchat.bench.sweep import GRIDS, Settings, grid, run, variants
from kvchat.config.modes import parse
from kvchat.errors import UsageError


def test_every_combination_at_every_budget_with_shares_of_it():
    settings = Settings("speculative", (256, 512), grid("speculative", ["window=1/4,1/2", "sink=4"]))
    assert variants(settings) == [
        "speculative:budget=256,window=64,sink=4", "speculative:budget=256,window=128,sink=4",
        "speculative:budget=512,window=128,sink=4", "speculative:budget=512,window=256,sink=4",
    ]  # fmt: skip
    assert variants(Settings("freeze", (256, 512), grid("freeze", ["k=1,2"]))) == ["freeze:k=1", "freeze:k=2"]


@pytest.mark.parametrize("mode", GRIDS)
def test_every_usual_grid_is_one_that_the_mode_accepts(mode):
    assert len(variants(Settings(mode, (256, 2048), grid(mode, [])))) >= 6
    assert set(GRIDS[mode]) <= set(parse(mode, {}).model_dump())


@pytest.mark.parametrize(
    ("mode", "given", "message"),
    [
        ("full", [], "nothing to vary in full"),
        ("sync", ["rho"], "is not KEY=VALUE"),
        ("sync", ["roh=1"], 'Did you mean "rho"'),
        ("freeze", ["K=1/4"], "of a mode with a budget"),
        ("sync", ["m=1/0"], 'share "1/0" is refused'),
        ("none", ["k=1"], 'no KV mode "none"'),
        ("none", [], 'no KV mode "none"'),
    ],
)
def test_what_cannot_be_varied_is_refused(mode, given, message):
    with pytest.raises(UsageError, match=message):
        variants(Settings(mode, grid=grid(mode, given)))


def test_a_window_that_holds_the_text_agrees_better_than_one_that_does_not():
    settings = Settings("streaming", (96, 448), grid("streaming", ["R=8"]), 350, tokens=6, passages=1, cases=1)
    result = run(settings)
    small, large = result["summary"]
    assert large["kl_mean"] < small["kl_mean"]
    assert (small["cases"], large["right"]) == (3, 3)
    assert small["right"] < 3
    assert [row[0] for row in tables(result)[0].rows] == ["streaming, budget=96, R=8", "streaming, budget=448, R=8"]
