"""Every mode against the independent reference: the tokens read, and dense attention over them (E2, E3)."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from support.grids import WHOLE, sampled
from support.kv_run import REFERENCES, Run
from support.mode_rows import COMPARED, CORE, MET, MIXED, ROWS
from support.random_kv import GROUPS, WIDTHS
from support.toy_model import KINDS, toy

from kvchat.config.modes import registered
from kvchat.kv.inspect import attended
from kvchat.kv.modes.sync_heads import TokenChoice

GEOMETRIES = {
    "1x1": {"kv_heads": 1, "group": 1, "page": 4},
    "1x4": {"kv_heads": 1, "group": 4, "page": 16},
    "2x3": {"kv_heads": 2, "group": 3, "page": 8, "d_v": 24},
    "4x2": {"kv_heads": 4, "group": 2, "page": 5, "d_k": 32, "d_v": 8},
    "unified": {"kv_heads": 2, "group": 2, "page": 8, "d_v": 24, "unified": True},
    "interleaved": {"kv_heads": 2, "group": 1, "page": 16, "interleaved": True},
}
# Group and head size: those of today's models in the long form.
LARGE = [*product(GROUPS, WIDTHS)] if WHOLE else [(7, 64), (8, 96), (7, 128), (8, 256)]
ROOMY = {"full": {}, "freeze": {"tau": 0.0, "budget": None}, "razor": {"budget": 1000, "share": 1.0}}


def test_every_reference_has_a_row():
    assert {mode for mode, _ in ROWS.values()} == set(REFERENCES)
    assert set(REFERENCES) == set(registered())
    assert set(MIXED) == set(KINDS)


@pytest.mark.parametrize("mode", registered())
def test_modes_report_exactly_their_documented_figures(mode):
    reported = set()
    for params in (params for name, params in ROWS.values() if name == mode):
        run = Run(toy(("plain", "plain"), **GEOMETRIES["2x3"], seed=3), mode, **params).begun(100, 2)
        if run.kv.mode.drafter:
            run.kv.mode.drafter.verified([1, 2], 1)
        run.kv.mode.choice = TokenChoice("100 stored tokens", 1.0, 64)
        reported |= run.kv.mode.report().stats.keys()
    assert reported == registered()[mode].figures.keys()


@pytest.mark.parametrize(
    ("row", "geometry"), dict.fromkeys([*((row, "2x3") for row in ROWS), *sampled(CORE, [*GEOMETRIES], each=3)])
)
def test_sets_and_outputs_match_the_reference(row, geometry):
    """Every row in one geometry, each mode's two core rows in three; in all of them in the long form."""
    run = Run.of_row(row, toy(("plain", "plain"), **GEOMETRIES[geometry], seed=3))
    run.prefill(100, chunk=37)
    run.step(15)
    run.check()
    run.prefill(35)
    run.step(5)
    run.check()


@pytest.mark.parametrize(("row", "heads"), sampled(CORE, LARGE, each=2), ids=str)
def test_sets_and_outputs_match_the_reference_at_heads_of_todays_models(row, heads):
    """Each mode's two core rows at two sizes; at every group and head size in the long form."""
    (mode, params), (group, d) = ROWS[row], heads
    run = Run(toy(("plain", "plain"), kv_heads=2, group=group, d_k=d, d_v=d, page=8, ids=128, seed=3), mode, **params)
    run.prefill(100, chunk=37)
    run.step(12)
    run.check()


@pytest.mark.parametrize(("row", "first"), sampled(CORE, [1, 3, 6, 20]))
def test_short_conversations_can_outgrow_their_room_in_one_answer(row, first):
    """Each mode's two core rows with one first length each; with all of them in the long form."""
    model = toy(("plain", "plain"), page=4)
    run = Run.of_row(row, replace(model, geometry=replace(model.geometry, headroom=32)))  # so that it grows soon
    run.prefill(first)
    capacities = set()
    for _ in range(80):
        run.step()
        capacities.add(run.kv.state.host.capacity)
    run.check()
    assert len(capacities) >= 3


def test_freeze_with_windows_can_start_without_a_prefill():
    model = toy(("window", "sinks"), group=1, d_k=8, d_v=8, page=5, seed=1)
    run = Run(model, "freeze", K=1, tau=1.0, k=0.25)
    run.step(34)
    run.check()


@pytest.mark.parametrize("row", [*MET, *COMPARED])
def test_a_budget_above_the_conversation_equals_full_mode(row):
    mode, params = ROWS[row]
    run = prefilled(mode, **{**params, **ROOMY.get(mode, {"budget": 1000})})
    for expected in steps_of_full():
        for one, other in zip(run.step(), expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
        assert run.kv.step.exact
    assert all(bool(attended(run.kv.state, layer).all()) for layer in (0, 2, 3, 4))


def prefilled(mode: str, **params) -> Run:
    run = Run(toy(MIXED, page=8), mode, **params)
    run.prefill(130, chunk=64)
    return run


@cache
def steps_of_full() -> list[list[torch.Tensor]]:
    run = prefilled("full")
    return [run.step() for _ in range(10)]
