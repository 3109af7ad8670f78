"""Reported bytes match allocated and planned bytes in every mode (E11); slots and free indices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.grids import sampled
from support.kv_run import Run
from support.memory import resident, tensors_of
from support.mode_rows import FIRST, ROWS
from support.toy_model import toy

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.memory.eight_bit_pool import FreeList

PLAIN = ("plain", "plain")


@pytest.mark.parametrize(
    ("row", "kwargs"), sampled(ROWS, [{}, {"d_k": 32, "d_v": 8}, {"dtype": torch.bfloat16, "kv_heads": 4}])
)
def test_reported_bytes_match_allocated_and_planned_bytes(row, kwargs):
    run = Run.of_row(row, toy(PLAIN, page=8, **kwargs)).begun(300)
    kv = run.kv
    allocated = sum(tensors_of(kv).values())
    # The host pool's storages are address space; only the memory resident in them counts.
    for region in kv.state.host._regions:
        allocated += resident(region) - region.size
    reported = kv.device_bytes + kv.state.host.nbytes
    queries = kv.state.query.nbytes + kv.state.prompt.rows.nbytes  # of the last token, and of the prompt's last tokens
    small = queries + kv.state.control.nbytes + 4096  # flags by position, counters
    assert reported <= allocated <= reported * 1.01 + small
    assert (
        abs(kv.mode.plan(kv.state.capacity).device_bytes(kv.state.geometry) - kv.device_bytes) <= 0.01 * kv.device_bytes
    )


@pytest.mark.parametrize("row", FIRST.values())
def test_device_bytes_stay_flat_once_the_budget_is_full(row):
    mode, params = ROWS[row]
    run = Run(toy(PLAIN, page=8), mode, **params).begun(300)
    before = run.kv.device_bytes
    run.step(30)
    grew = run.kv.device_bytes - before
    if mode == "streaming":
        assert grew == 0
    assert grew <= 30 * run.toy.geometry.token_bytes * 2


def test_a_truncation_releases_later_tokens_and_the_cut_page():
    layout = Layout(1, 3, sink=2, window=9, pages=4, shared=False, pinned=3)
    slots = DeviceSlots(layout, Geometry(3, 8, 4, 16, 8, torch.float32, page=8), torch.device("cpu"))
    for position in range(30):
        slots.assign(torch.tensor(position))
    slots.pages[:] = torch.tensor([0, 1, 2, 3])
    slots.truncate(25)
    assert all(sorted(row[row >= 0].tolist()) == [0, 1, 21, 22, 23, 24] for row in slots.table.flatten(0, 1))
    assert slots.pages.flatten(0, 1).unique(dim=0).tolist() == [[0, 1, 2, EMPTY]]


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_the_lowest_free_indices_are_taken(steps):
    """Compared with a set that grows."""
    free, used = FreeList(3), {0, 1, 2}
    for gives_back, number in steps:
        if gives_back:
            returned = sorted(used)[::2][:number]
            free.give_back(returned)
            used -= set(returned)
            continue
        lowest = free.lowest(number)
        assert lowest == [index for index in range(100) if index not in used][:number]
        longest = free.after(number)
        free.take(lowest)
        used |= set(lowest)
        assert longest == free.after(0) > max(used, default=-1)
