"""Bytes reported are bytes allocated and bytes foretold, in every mode (E11)."""

from __future__ import annotations

import pytest
import torch
from support.kv_run import Run
from support.memory import resident, tensors_of
from support.mode_rows import CORE, ROWS
from support.toy_model import toy

PLAIN = ("plain", "plain")


@pytest.mark.parametrize("kwargs", [{}, {"d_k": 32, "d_v": 8}, {"dtype": torch.bfloat16, "kv_heads": 4}])
@pytest.mark.parametrize("row", ROWS)
def test_bytes_reported_are_bytes_allocated_and_bytes_foretold(row, kwargs):
    run = Run.of_row(row, toy(PLAIN, page=8, **kwargs))
    run.prefill(300)
    kv = run.kv
    allocated = sum(tensors_of(kv).values())
    # The host pool's storages are address space: what counts of them is the memory they hold.
    for region in kv.state.host._regions:
        allocated += resident(region) - region.size
    reported = kv.device_bytes + kv.state.host.nbytes
    small = kv.state.query.nbytes + kv.state.control.nbytes + 4096  # last queries, flags by position, counters
    assert reported <= allocated <= reported * 1.01 + small
    assert (
        abs(kv.mode.plan(kv.state.capacity).device_bytes(kv.state.geometry) - kv.device_bytes) <= 0.01 * kv.device_bytes
    )


@pytest.mark.parametrize("row", CORE)
def test_device_bytes_stay_flat_once_the_budget_is_full(row):
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params)
    run.prefill(300)
    before = run.kv.device_bytes
    run.step(30)
    grew = run.kv.device_bytes - before
    if mode == "streaming" and params.get("R") != 0:
        assert grew == 0
    assert grew <= 30 * run.toy.geometry.token_bytes * 2
