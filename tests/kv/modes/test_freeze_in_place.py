"""In unified memory freeze reads what its table names where it is stored: the same tokens, and nothing moves."""

from itertools import product

import pytest
import torch
from support.freeze_run import FreezeRun
from support.grids import thinned

from kvchat.kv.ops import cpu_ops


def run_of(unified: bool, windowed: bool, **params) -> FreezeRun:
    return FreezeRun(strength=1.5, windowed=windowed, unified=unified, **params)


@pytest.mark.parametrize(
    ("params", "way"),
    thinned(
        [{}, {"budget": 90, "K": 16}, {"profile": "paper"}, {"score": "raw", "tau": 4.0}],
        [*product([True, False], repeat=2)],
    ),
    ids=str,
)
def test_in_place_reads_match_slots(params, way, monkeypatch):
    windowed, compiled = way
    if not compiled:
        monkeypatch.setattr(cpu_ops, "compiled_loops", lambda *_: None)
    here, slots = (run_of(unified, windowed, **params) for unified in (True, False))
    assert here.kv.state.slots[0].layout.in_place > slots.kv.state.slots[0].layout.in_place
    fewest = 300

    def go_on(steps):
        nonlocal fewest
        for _ in range(steps):
            for run in (here, slots):
                run.step()
                run.check()
            assert here.active() == slots.active()
            for output, expected in zip(here.outputs, slots.outputs, strict=True):
                assert torch.allclose(output, expected, atol=1e-5)
            fewest = min(fewest, len(here.active()))

    for run in (here, slots):
        run.prefill(200, pinned=(3, 50))
    go_on(60)
    for run in (here, slots):
        run.truncate(170)
        run.prefill(40)
    go_on(20)
    for run in (here, slots):
        run.recover("WR")
    go_on(20)
    assert fewest < 180
    assert int(here.kv.mode.thawed) == int(slots.kv.mode.thawed)
    assert here.kv.state.read_pairs == slots.kv.state.read_pairs


def test_in_place_reads_move_nothing_and_hold_nothing_twice():
    here, slots = (run_of(unified, windowed=False).begun(300, 40) for unified in (True, False))
    assert int(here.kv.mode.thawed) > 0
    assert here.kv.state.transfer.moved_bytes() == 0 < slots.kv.state.transfer.moved_bytes()
    assert here.kv.state.slots[0].kv.numel() == 0
    planned = here.kv.mode.plan(here.kv.state.capacity)
    assert planned.moved_bytes(here.geometry, 340) == 0
    assert here.kv.state.slot_bytes == sum(each.nbytes(here.geometry) for each in planned.layouts)
