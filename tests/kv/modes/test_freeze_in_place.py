"""In unified memory freeze reads tokens where they are stored: the same ones as with slots, without moves."""

from itertools import product

import pytest
import torch
from support.freeze_run import FreezeRun
from support.grids import sampled

from kvchat.kv.ops import cpu_ops


def run_of(unified: bool, windowed: bool, **params) -> FreezeRun:
    return FreezeRun(strength=1.5, windowed=windowed, unified=unified, **params)


@pytest.mark.parametrize(
    ("params", "way"),
    sampled(
        [{}, {"budget": 90, "K": 16}, {"profile": "paper"}, {"score": "raw", "tau": 4.0}],
        [*product([True, False], repeat=2)],
    ),
    ids=str,
)
def test_in_place_reads_match_slots(params, way, monkeypatch):
    windowed, compiled = way
    if not compiled:
        monkeypatch.setattr(cpu_ops, "compiled_loops", lambda *_: None)
    in_place, slots = (run_of(unified, windowed, **params) for unified in (True, False))
    assert in_place.kv.state.slots[0].layout.in_place > slots.kv.state.slots[0].layout.in_place
    fewest = 300

    def decode(steps):
        nonlocal fewest
        for _ in range(steps):
            for run in (in_place, slots):
                run.step()
                run.check()
            assert in_place.active() == slots.active()
            for output, expected in zip(in_place.outputs, slots.outputs, strict=True):
                assert torch.allclose(output, expected, atol=1e-5)
            fewest = min(fewest, len(in_place.active()))

    for run in (in_place, slots):
        run.prefill(200, pinned=(3, 50))
    decode(60)
    for run in (in_place, slots):
        run.truncate(170)
        run.prefill(40)
    decode(20)
    for run in (in_place, slots):
        run.recover("WR")
    decode(20)
    assert fewest < 180
    assert int(in_place.kv.mode.thawed) == int(slots.kv.mode.thawed)
    assert in_place.kv.state.read_pairs == slots.kv.state.read_pairs


def test_in_place_reads_move_nothing_and_hold_nothing_twice():
    in_place, slots = (run_of(unified, windowed=False).begun(300, 40) for unified in (True, False))
    assert int(in_place.kv.mode.thawed) > 0
    assert in_place.kv.state.transfer.moved_bytes() == 0 < slots.kv.state.transfer.moved_bytes()
    assert in_place.kv.state.slots[0].kv.numel() == 0
    planned = in_place.kv.mode.plan(in_place.kv.state.capacity)
    assert planned.moved_bytes(in_place.geometry, 340) == 0
    assert in_place.kv.state.slot_bytes == sum(each.nbytes(in_place.geometry) for each in planned.layouts)
