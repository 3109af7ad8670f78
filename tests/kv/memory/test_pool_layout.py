"""The two orders of a layer's K/V: rows and blocks are where the view by pages has them."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.grids import thinned
from support.kv_run import Run
from support.memory import resident, tensors_of
from support.mode_rows import CORE, ROWS
from support.toy_model import toy

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.device_slots import EMPTY, DeviceSlots, Layout
from kvchat.kv.memory.eight_bit_pool import FreeList
from kvchat.kv.memory.host_pool import QuantizedByPage, layout_of

PAGES, HEADS, PAGE, D = 6, 3, 8, 16


def geometry(unified: bool, d: int = D) -> Geometry:
    return Geometry(2, 2 * HEADS, HEADS, d, d, torch.float32, PAGE, unified=unified)


@pytest.fixture(params=[False, True], ids=["by page", "by head"])
def arranged(request):
    """A layout, a table whose elements all differ, and the tokens there is room for."""
    found = layout_of(geometry(request.param))
    nbytes = found.reserved_bytes(PAGES * PAGE)
    table = found.table(torch.arange(nbytes // 4, dtype=torch.float32).view(torch.uint8))
    return found, table, table.shape[0] * PAGE


def test_a_row_is_a_tokens_and_a_block_a_pages_k_or_v_of_a_head(arranged):
    found, table, reserved = arranged
    rows = found.rows(table)
    assert rows.data_ptr() == table.data_ptr(), "a view"
    for token, head in product((0, 7, 8, PAGES * PAGE - 1), range(HEADS)):
        row = int(found.row_index(torch.tensor(token), torch.tensor(head), reserved))
        for at, kind in ((row, 0), (row + found.value_rows(reserved), 1)):
            assert torch.equal(rows[at], table[token // PAGE, head, kind, token % PAGE])
    blocks = rows.reshape(-1, PAGE, D)
    of_page, of_head, of_values = found.block_strides(reserved)
    for page, head, kind in product((0, 1, PAGES - 1), range(HEADS), (0, 1)):
        assert torch.equal(blocks[page * of_page + head * of_head + kind * of_values], table[page, head, kind])


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("d", [4, 6, 128])
def test_there_is_room_for_what_was_asked_for(unified, d):
    found = layout_of(geometry(unified, d))
    for tokens in (1, 8, 9, 500, 20_000):
        assert found.table(torch.empty(found.reserved_bytes(tokens), dtype=torch.uint8)).shape[0] * PAGE >= tokens
        needed = tokens * HEADS * 2 * d * 4
        assert needed <= found.nbytes(tokens) <= found.reserved_bytes(tokens)
        if not unified:
            assert found.tokens(found.nbytes(tokens)) >= tokens


def test_8_bit_pages_lie_one_after_another():
    found = QuantizedByPage(geometry(True))
    table = found.table(torch.arange(3 * found.page_bytes, dtype=torch.int64).to(torch.uint8))
    assert (table.shape[:2], table.is_contiguous()) == ((3, HEADS), True)
    assert table[0].numel() == found.page_bytes


# ---- Bytes reported are bytes allocated and bytes foretold, in every mode (E11)


PLAIN = ("plain", "plain")


@pytest.mark.parametrize(
    ("row", "kwargs"), thinned(ROWS, [{}, {"d_k": 32, "d_v": 8}, {"dtype": torch.bfloat16, "kv_heads": 4}])
)
def test_bytes_reported_are_bytes_allocated_and_bytes_foretold(row, kwargs):
    run = Run.of_row(row, toy(PLAIN, page=8, **kwargs))
    run.prefill(300)
    kv = run.kv
    allocated = sum(tensors_of(kv).values())
    # The host pool's storages are address space: what counts of them is the memory they hold.
    for region in kv.state.host._regions:
        allocated += resident(region) - region.size
    reported = kv.device_bytes + kv.state.host.nbytes
    queries = kv.state.query.nbytes + kv.state.prompt.rows.nbytes  # of the last token, and of the prompt's last
    small = queries + kv.state.control.nbytes + 4096  # flags by position, counters
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


# ---- Device slots: what lies where, what a new token releases, and what growing keeps


GEOMETRY = Geometry(3, 8, 4, 16, 8, torch.float32, page=8)
LAYOUTS = {
    "shared": Layout(0, 3, sink=3, window=12),
    "pages": Layout(1, 3, sink=2, window=9, pages=4, shared=False, pinned=3),
    "some heads": Layout(0, 2, sink=0, window=20, shared=False, heads=((0, 2), (1, 3))),
    "unordered": Layout(0, 3, sink=0, window=16, unordered=True),
    "in place": Layout(0, 3, sink=0, window=16, unordered=True, in_place=True),
}


def slots_of(layout: Layout) -> DeviceSlots:
    return DeviceSlots(layout, GEOMETRY, torch.device("cpu"))


def write(slots: DeviceSlots, position: int) -> None:
    """Store a token whose K and V are its position."""
    slots.assign(torch.tensor(position))
    for layer in range(slots.layout.first, slots.layout.last):
        slots.write(layer, torch.full((2, GEOMETRY.kv_heads, GEOMETRY.d), float(position)))


def held(slots: DeviceSlots) -> list[int]:
    """The tokens of every table, ascending; their K and V are what was written."""
    (tokens,) = {tuple(sorted(row[row >= 0].tolist())) for row in slots.table.flatten(0, 1)}
    for layer in range(slots.layout.first, slots.layout.last):
        table = slots.table_of(layer).expand(slots.layout.width(GEOMETRY), -1)
        for rows in (slots.keys(layer), slots.values(layer)):
            assert torch.equal(rows[table >= 0], table[table >= 0].float()[:, None].expand(-1, rows.shape[-1]))
    return list(tokens)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_foretells_its_bytes(layout):
    assert slots_of(layout).nbytes == layout.nbytes(GEOMETRY)
    assert slots_of(layout).n % GEOMETRY.page == 0


@pytest.mark.parametrize("name", ["shared", "pages", "some heads"])
def test_sinks_stay_and_the_window_is_a_ring(name):
    slots = slots_of(LAYOUTS[name])
    sink, window = slots.layout.sink, slots.layout.window
    for position in range(50):
        write(slots, position)
        recent = range(max(0, position + 1 - window), position + 1)
        assert held(slots) == sorted({*range(min(sink, position + 1)), *recent} - {*range(position + 1, sink)})


def test_a_truncation_releases_what_follows_and_the_page_it_lies_in():
    slots = slots_of(LAYOUTS["pages"])
    for position in range(30):
        write(slots, position)
    slots.pages[:] = torch.tensor([0, 1, 2, 3])
    slots.truncate(25)
    assert held(slots) == [0, 1, 21, 22, 23, 24]
    assert slots.pages.flatten(0, 1).unique(dim=0).tolist() == [[0, 1, 2, EMPTY]]


def test_of_resident_pages_the_tokens_in_between_are_opened():
    slots = slots_of(LAYOUTS["pages"])
    slots.pages[:] = torch.tensor([3, EMPTY, 0, 1])
    slots.open_pages(slice(None), 2, torch.tensor(26))
    table = slots.table[0, 0, : slots.offset].tolist()
    assert table == [24, 25, 26, *[EMPTY] * 13, EMPTY, EMPTY, *range(2, 16)]
    assert (slots.table[..., : slots.offset] == slots.table[0, 0, : slots.offset]).all()


def test_slots_that_grow_keep_their_tokens():
    for small, large in (
        (Layout(0, 3, sink=3, window=16), Layout(0, 3, sink=3, window=40)),
        (Layout(0, 3, sink=0, window=16, unordered=True), Layout(0, 3, sink=0, window=40, unordered=True)),
    ):
        slots = slots_of(small)
        for position in range(15):
            write(slots, position)
        slots.table[slots.table == 7] = EMPTY
        kept = held(slots)
        slots = slots.grown(large)
        assert held(slots) == kept == [position for position in range(15) if position != 7]
        for position in range(15, 40):
            write(slots, position)
        assert held(slots) == [*kept, *range(15, 40)]


def test_a_new_token_takes_a_free_slot_of_an_unordered_layout():
    slots = slots_of(LAYOUTS["unordered"])
    for position in range(16):
        write(slots, position)
    free = (slots.table[0, 0] == 5).nonzero()[0]
    slots.table[..., free] = EMPTY
    write(slots, 16)
    assert held(slots) == [0, 1, 2, 3, 4, *range(6, 17)]
    assert torch.equal(slots.current_slot, free)


def test_the_mask_opens_what_the_table_names_and_counts_it():
    slots = slots_of(LAYOUTS["shared"])
    for position in range(30):
        write(slots, position)
    slots.begin_step()
    for window, read in ((None, [0, 1, 2, *range(18, 30)]), (5, [*range(25, 30)])):
        before = int(slots.read_pairs)
        bias = slots.bias(0, torch.tensor(29), window)
        assert sorted(slots.table_of(0)[bias[:, 0] == 0].tolist()) == read
        assert int(slots.read_pairs) - before == len(read) * GEOMETRY.kv_heads
    assert torch.equal(slots.attended, slots.table)


# ---- Indices of a pool: the lowest free ones first, as a set that grows would give them


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_the_lowest_free_indices_are_taken_and_given_back(steps):
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
