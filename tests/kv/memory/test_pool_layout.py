"""The two orders of a layer's K/V: rows and blocks are where the view by pages has them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.grids import thinned
from support.kv_run import Run
from support.memory import resident, tensors_of
from support.mode_rows import CORE, ROWS
from support.toy_model import toy

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.host_pool import ByPage, QuantizedByPage, layout_of

PAGES, HEADS, PAGE, D = 6, 3, 8, 16


def geometry(unified: bool, d: int = D) -> Geometry:
    return Geometry(2, 2 * HEADS, HEADS, d, d, torch.float32, PAGE, unified=unified)


@pytest.fixture(params=[False, True], ids=["by page", "by head"])
def arranged(request) -> tuple[ByPage, torch.Tensor, int]:
    """A layout, a table whose elements all differ, and the tokens there is room for."""
    found = layout_of(geometry(request.param))
    nbytes = found.reserved_bytes(PAGES * PAGE)
    table = found.table(torch.arange(nbytes // 4, dtype=torch.float32).view(torch.uint8))
    return found, table, table.shape[0] * PAGE


def test_a_row_is_a_tokens_k_or_v_of_a_head(arranged):
    found, table, reserved = arranged
    rows = found.rows(table)
    for token, head in product((0, 7, 8, PAGES * PAGE - 1), range(HEADS)):
        row = int(found.row_index(torch.tensor(token), torch.tensor(head), reserved))
        for at, kind in ((row, 0), (row + found.value_rows(reserved), 1)):
            assert torch.equal(rows[at], table[token // PAGE, head, kind, token % PAGE])


def test_a_block_is_a_pages_k_or_v_of_a_head(arranged):
    found, table, reserved = arranged
    blocks = found.rows(table).reshape(-1, PAGE, D)
    of_page, of_head, of_values = found.block_strides(reserved)
    for page, head, kind in product((0, 1, PAGES - 1), range(HEADS), (0, 1)):
        assert torch.equal(blocks[page * of_page + head * of_head + kind * of_values], table[page, head, kind])


def test_rows_and_blocks_are_views(arranged):
    found, table, _ = arranged
    assert found.rows(table).data_ptr() == table.data_ptr()


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


SIZES = [{}, {"d_k": 32, "d_v": 8}, {"dtype": torch.bfloat16, "kv_heads": 4}]


@pytest.mark.parametrize(("row", "kwargs"), thinned(ROWS, SIZES))
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
