"""Pinned messages: every mode attends to them and to its own set, each token once; checked with dense attention."""

import pytest
import torch
from support.kv_run import Run
from support.kv_steps import use_gpu_path
from support.mode_rows import MET, MIXED, ROWS
from support.toy_model import toy

from kvchat.engine.metrics import Ribbon
from kvchat.errors import DoesNotFitError
from kvchat.kv.inspect import attended, attended_counts
from kvchat.kv.manager import take_checkpoint
from kvchat.kv.memory import available

# Among the sinks, across a page boundary, more than a page, and at first inside every window.
FIRST, SECOND = [*range(2, 10), *range(30, 35)], [*range(60, 85), *range(146, 150)]


def run_of(row: str, on_a_gpu: bool = False) -> Run:
    run = Run.of_row(row, toy(MIXED, page=8))
    if on_a_gpu:
        use_gpu_path(run.kv)
    return run


@pytest.mark.parametrize("row", MET)
def test_pinned_tokens_are_read_with_the_modes_own_set(row):
    run = run_of(row).begun(150, 3)
    run.pin(FIRST + SECOND)
    run.step(10)
    run.check()
    run.pin(SECOND)
    run.step(4)
    run.prefill(20)
    run.step(6)
    run.truncate(64)  # also removes some pinned tokens
    run.prefill(50)
    run.step(5)
    assert run.kv.state.pins == tuple(range(60, 64))
    run.pin([])
    run.step(5)
    run.check()


@pytest.mark.parametrize("row", ["streaming", "speculative", "sync", "sync-resident", "freeze-budget", "full-resident"])
def test_pinned_tokens_are_read_on_the_gpu_path(row):
    run = run_of(row, on_a_gpu=True).begun(150)
    run.pin(FIRST + SECOND)
    run.step(20)
    run.check()


def test_pins_survive_switches_and_a_checkpoint():
    run = run_of("full").begun(170)
    run.pin(SECOND)
    for row in MET:
        mode, params = ROWS[row]
        run.switch(mode, **params)
        run.step(2)
    run.check()
    checkpoint = take_checkpoint(run.kv.state, 70)
    run.kv.truncate(70)
    assert run.kv.state.pins == tuple(range(60, 70))
    run.kv.restore(checkpoint)
    run.step(2)
    assert run.kv.state.pins == tuple(SECOND)
    run.check()


def test_pins_that_are_read_anyway_take_no_slots():
    for row, positions in (("full", SECOND), ("streaming", [0, 3])):
        run = run_of(row).begun(150)
        before = run.kv.state.slots
        run.pin(positions)
        assert run.kv.state.slots is before
        assert not run.kv.mode.pins


def test_pins_stay_if_new_pins_do_not_fit(monkeypatch):
    run = run_of("streaming").begun(150)
    run.pin(FIRST)

    def refuse(*given):
        raise DoesNotFitError("no room")

    with monkeypatch.context() as short:
        short.setattr(available, "check_fits", refuse)
        with pytest.raises(DoesNotFitError):
            run.kv.pin(SECOND)
    run.step(3)
    assert run.kv.state.pins == tuple(FIRST)
    assert bool(attended(run.kv.state, 0)[:, torch.tensor(FIRST)].all())


# ---- A pinned system prompt is read in every mode, in addition to the budget


PREAMBLE = 45
# Their references know only the modes' own sinks: outputs are compared over the sets that were read.
OWN_SETS = ("freeze", "sync")


def pinned_run(row: str) -> Run:
    mode, params = ROWS[row]
    run = Run(toy(("plain", "plain"), page=8, kv_heads=3), mode, PREAMBLE, **params, pin_system=True)
    run.exact = mode not in OWN_SETS
    return run


def assert_pinned_is_read(run: Run) -> None:
    assert all(bool(attended(run.kv.state, layer)[:, :PREAMBLE].all()) for layer in (0, 1))


@pytest.mark.parametrize("row", MET)
def test_a_pinned_system_prompt_is_read_at_every_step(row):
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


def test_a_pinned_system_prompt_survives_switches_and_is_marked():
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


@pytest.mark.parametrize("row", ["streaming", "speculative", "sync", "freeze-budget"])
def test_a_pinned_system_prompt_does_not_use_the_budget(row):
    run, mode = pinned_run(row), ROWS[row][0]
    other = Run(run.toy, mode, **ROWS[row][1])
    for each in (run, other):
        each.prefill(150)
        each.step(6)
    pinned, plain = (each.kv.mode for each in (run, other))
    assert pinned.report().params["budget"] == plain.report().params["budget"]
    assert pinned.extra_sinks == PREAMBLE - plain.sink
    with_prompt, without = (attended(each.kv.state, 1)[:, PREAMBLE:].sum() for each in (run, other))
    assert int(with_prompt) >= 0.8 * int(without)
