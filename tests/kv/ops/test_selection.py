"""Slot assignment, which keeps what is still wanted in place, and every mode over 8-bit pages."""

import pytest
import torch
from support.eight_bit_run import EightBitRun
from support.kv_steps import use_gpu_path
from support.mode_rows import CORE, MIXED, ROWS
from support.toy_model import toy

from kvchat.kv.inspect import attended
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops import key_codes, selection

HEADS = 3


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(3)


def distinct(draw: torch.Generator, rows: int, k: int, of: int, share: float = 0.7) -> torch.Tensor:
    """``[rows, k]`` numbers from 1 on, distinct in a row, some of them EMPTY."""
    numbers = torch.stack([torch.randperm(of - 1, generator=draw)[:k] + 1 for _ in range(rows)])
    return numbers.masked_fill(torch.rand(rows, k, generator=draw) > share, EMPTY)


def wanted_of(row: torch.Tensor) -> set[int]:
    return set(row.tolist()) - {EMPTY}


def test_resident_pages_keep_their_slot_and_every_page_has_one(draw):
    for _ in range(50):
        wanted, resident = (distinct(draw, HEADS, 6, 10) for _ in range(2))
        placed = selection.assign_slots(wanted, resident, 10, reuse=True)
        for want, held, now in zip(wanted, resident, placed, strict=True):
            assert sorted(now[now >= 0].tolist()) == sorted(wanted_of(want))
            stays = torch.isin(held, want) & (held >= 0)
            assert torch.equal(now[stays], held[stays])


def test_tokens_take_empty_slots_best_first(draw):
    for _ in range(50):
        wanted, resident = distinct(draw, HEADS, 6, 20), distinct(draw, HEADS, 9, 20)
        placed = selection.assign_slots(wanted, resident, 20)
        for want, held, now in zip(wanted, resident, placed, strict=True):
            order = [token for token in want.tolist() if token != EMPTY]
            stays = [token for token in order if token in held.tolist()]
            comes = [token for token in order if token not in stays][: int((held == EMPTY).sum())]
            assert sorted(now[now >= 0].tolist()) == sorted(stays + comes)
            kept = torch.isin(held, torch.tensor(stays))
            assert torch.equal(now[kept], held[kept])
            assert (now[(held >= 0) & ~kept] == EMPTY).all(), "attention may still read evicted slots"


def test_codes_overestimate_page_mass_by_about_the_excess():
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn((1, 32 * 4000, 16), generator=generator), torch.randn((1, 16), generator=generator)
    index = key_codes.encode(keys, 32, 2)
    exact, found = torch.einsum("qd,hnd->hn", query, keys) * 0.5, key_codes.token_scores(query, index, 32, 2, 0.5)[0]
    overestimate = (found.logsumexp(-1) - exact.logsumexp(-1)).item()
    expected = key_codes.excess(query, index, 32, 2, 0.5).mean().item()
    assert expected > 0.05
    assert overestimate == pytest.approx(expected, rel=0.25)


# ---- Every mode over 8-bit pages against dense attention over K/V that numpy quantized


@pytest.mark.parametrize(("row", "unified"), [*((row, True) for row in CORE), ("full-resident", False)])
def test_every_mode_over_8_bit_pages_matches_dense_attention(row, unified):
    run = EightBitRun.of_row(row, toy(("plain", "plain"), kv_heads=2, group=3, d_v=24, page=8, unified=unified))
    run.prefill(90, chunk=37)
    run.step(17)
    run.check()
    run.truncate(83)
    run.check()
    run.prefill(19)
    run.step(9)
    run.check()
    assert all(run.kv.state.host.quantized[:-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ["full", "full-resident", "speculative"])
def test_8_bit_pages_work_with_windows_softcaps_and_sinks(row, dtype):
    run = EightBitRun.of_row(row, toy(MIXED, page=8, dtype=dtype, unified=row == "full"))
    run.prefill(90, chunk=50)
    run.step(20)
    run.check()


@pytest.mark.parametrize("row", ["full", "streaming", "freeze", "sync", "speculative"])
def test_mixed_pages_survive_switches_with_pinned_messages(row):
    run = EightBitRun(toy(("plain", "plain"), page=8, unified=True), "full", quantizes=False)
    mode, params = ROWS[row]
    run.prefill(70)
    run.set(True)
    run.step(21)
    run.switch(mode, **params)
    run.prefill(20)
    run.pin([*range(30, 35), *range(60, 85)])
    run.step(5)
    run.set(False)
    run.step(20)
    run.check()
    quantized = run.kv.state.host.quantized
    assert quantized[:14] == [False] * 8 + [True] * 6
    assert quantized[-2:] == [False] * 2
    run.pin([*range(60, 64)])
    run.prefill(20)
    run.step(4)
    assert all(bool(attended(run.kv.state, layer)[:, 60:64].all()) for layer in range(2))
    run.switch("full")
    run.step(9)
    run.check()


@pytest.mark.parametrize("row", ["full-resident", "speculative", "sync", "freeze"])
def test_steps_without_readback_match_the_reference(row):
    runs = [EightBitRun.of_row(row, toy(("plain", "plain"), kv_heads=2, group=2, page=8)) for _ in range(2)]
    for run, path in zip(runs, (lambda kv: None, use_gpu_path), strict=True):
        run.prefill(90)
        path(run.kv)
        run.step(15)
        run.check()
