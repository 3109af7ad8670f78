"""A pinned system prompt is attended in every mode, beyond its budget, whatever happens to the conversation."""

from __future__ import annotations

import pytest
from support.kv_run import Run
from support.mode_rows import ROWS
from support.toy_model import toy

from kvchat.engine.metrics import Ribbon
from kvchat.kv.inspect import attended, attended_counts
from kvchat.kv.modes.base import TokenState

PREAMBLE = 45
# Their references know no sinks but the modes' own: outputs are compared under the sets that were read.
OWN_SETS = ("freeze", "sync")


def pinned_run(row: str) -> Run:
    mode, params = ROWS[row]
    run = Run(toy(("plain", "plain"), page=8, kv_heads=3), mode, PREAMBLE, **params, pin_system=True)
    run.exact = mode not in OWN_SETS
    return run


def assert_pinned_is_read(run: Run) -> None:
    assert all(bool(attended(run.kv.state, layer)[:, :PREAMBLE].all()) for layer in (0, 1))


@pytest.mark.parametrize("row", ROWS)
def test_pinned_tokens_are_read_at_every_step(row):
    run = pinned_run(row)
    run.prefill(150)
    for _ in range(15):
        run.step()
        assert_pinned_is_read(run)
    run.truncate(120)
    run.prefill(9)
    run.step(8)
    assert_pinned_is_read(run)
    run.check()


def test_they_stay_through_every_switch_and_are_marked():
    run = pinned_run("streaming")
    run.prefill(200)
    for row, (mode, params) in ROWS.items():
        run.exact = mode not in OWN_SETS
        run.switch(mode, **params, pin_system=True)
        run.step(2)
        assert_pinned_is_read(run)
        cell, letters, _ = Ribbon(run.kv).cells(attended_counts(run.kv.state), run.kv.mode.report())
        assert letters[: PREAMBLE // cell] == "P" * (PREAMBLE // cell), row
        assert "P" not in letters[PREAMBLE // cell + 1 :]
    run.check()
    run.switch("streaming", **ROWS["streaming"][1])
    run.step(20)
    assert not bool(attended(run.kv.state, 0)[:, 10:PREAMBLE].any())
    assert TokenState.PINNED.value == "pinned"


@pytest.mark.parametrize("row", ["streaming", "speculative", "sync", "freeze-budget"])
def test_what_is_pinned_does_not_count_against_the_budget(row):
    run, mode = pinned_run(row), ROWS[row][0]
    other = Run(run.toy, mode, **ROWS[row][1])
    for each in (run, other):
        each.prefill(150)
        each.step(6)
    pinned, plain = (each.kv.mode for each in (run, other))
    assert pinned.report().params["budget"] == plain.report().params["budget"]
    assert pinned.extra_sinks == PREAMBLE - plain.sink
    read, also = (attended(each.kv.state, 1)[:, PREAMBLE:].sum() for each in (run, other))
    assert int(read) >= 0.8 * int(also)
