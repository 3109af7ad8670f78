"""What is selected: bounds, the best pages, and slots of which those that are wanted again stay."""

import pytest
import torch
from support.eight_bit_run import EightBitRun
from support.kv_steps import as_on_a_gpu
from support.mode_rows import CORE, MIXED, ROWS
from support.toy_model import toy

from kvchat.kv.attention import AttentionSpec, attend, products
from kvchat.kv.inspect import attended
from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.ops import key_codes, selection
from kvchat.kv.ops.selection import Candidates

HEADS, GROUP, D, PAGE = 3, 2, 16, 8


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(3)


def distinct(draw: torch.Generator, rows: int, k: int, of: int, share: float = 0.7) -> torch.Tensor:
    """``[rows, k]`` distinct numbers from 1 on, some of them EMPTY."""
    numbers = torch.stack([torch.randperm(of - 1, generator=draw)[:k] + 1 for _ in range(rows)])
    return numbers.masked_fill(torch.rand(rows, k, generator=draw) > share, EMPTY)


def wanted_of(row: torch.Tensor) -> set[int]:
    return set(row.tolist()) - {EMPTY}


def test_no_key_of_a_page_scores_above_its_bound(draw):
    keys, query = torch.randn(HEADS, 37, D, generator=draw), torch.randn(HEADS * GROUP, D, generator=draw)
    scores = selection.page_scores(query, selection.page_bounds(keys, 5, PAGE), 0.25)
    exact = torch.einsum("hgd,hnd->hgn", query.view(HEADS, GROUP, D), keys) * 0.25
    padded = torch.nn.functional.pad(exact, (0, 3), value=-1e9).view(HEADS, GROUP, 5, PAGE)
    assert (padded.amax(-1) <= scores + 1e-5).all()
    one_key = selection.page_scores(query, selection.page_bounds(keys[:, :1], 1, PAGE), 0.25)
    assert torch.allclose(one_key[..., 0], exact[..., 0], atol=1e-5)


def test_the_best_candidates_are_chosen_and_no_others(draw):
    scores = torch.randn(HEADS, GROUP, 12, generator=draw) * 3
    scores[..., :2] = 100  # the best are no candidates
    scores[0, :, 5] = -1e4  # its weight underflows
    masked = Candidates.between(2, torch.tensor(8), 12).masked
    weights = scores[..., 2:9].softmax(-1).mean(1)
    for k in (3, 7, 10):
        chosen = selection.top_pages(scores, masked, k)
        assert chosen.shape == (HEADS, k)
        for head in range(HEADS):
            best = (weights[head].argsort(descending=True)[:k] + 2).tolist()
            assert wanted_of(chosen[head]) == set(best)
            assert (chosen[head] == EMPTY).sum() == max(0, k - 7)


def test_a_wanted_page_that_is_resident_keeps_its_slot_and_each_has_one(draw):
    for _ in range(50):
        wanted, resident = (distinct(draw, HEADS, 6, 10) for _ in range(2))
        placed = selection.assign_slots(wanted, resident, 10, reuse=True)
        for want, held, now in zip(wanted, resident, placed, strict=True):
            assert sorted(now[now >= 0].tolist()) == sorted(wanted_of(want))
            stays = torch.isin(held, want) & (held >= 0)
            assert torch.equal(now[stays], held[stays])


def test_tokens_take_empty_slots_best_first_and_the_last_wait(draw):
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
            assert (now[(held >= 0) & ~kept] == EMPTY).all(), "attention may be reading what left"


def test_heads_are_corrected_by_the_mean_cosine_of_their_group():
    before = torch.ones(2 * GROUP, D)
    query = before.clone()
    query[0] = -1  # the other of its group stays: the mean is 0
    flagged = [selection.needs_correction(query, before, 2, tau).tolist() for tau in (-0.5, 0.5, 1.1)]
    assert flagged == [[False, False], [True, False], [True, True]]
    taken = selection.chosen_by(torch.tensor([True, False]), query, 2 * before)
    assert torch.equal(taken, torch.cat((query[:GROUP], 2 * before[GROUP:])))


def test_what_tokens_would_add_that_are_not_read_is_right_for_equal_tokens_of_a_page():
    """Attention to what is read and to the others' mean values is then attention to everything."""
    heads, group, d, pages = 2, 3, 8, 4
    keys, values = (torch.randn(heads, pages, 1, d).expand(-1, -1, 32, -1).reshape(heads, -1, d) for _ in range(2))
    query = torch.randn(heads, group, d)
    index = key_codes.encode(keys.to(torch.bfloat16), 32, 2)
    keys = key_codes.decode(index, d, 32, 2, torch.bfloat16)
    scores, read = query @ keys.transpose(1, 2), torch.arange(5, 40)
    unread = torch.ones(heads, pages * 32, dtype=torch.bool).index_fill(1, read, False)
    none = torch.zeros(heads, group, pages)
    means = values[:, ::32]
    exact = attend(query, products(keys, values), None, AttentionSpec(1.0))[0]
    for sinks in (None, torch.randn(heads, group)):
        exact = attend(query, products(keys, values), None, AttentionSpec(1.0), sinks)[0]
        added = selection.of_unread(scores, unread, none, means)
        found = attend(query, products(keys[:, read], values[:, read]), None, AttentionSpec(1.0), sinks, added)[0]
        assert torch.allclose(found, exact, atol=1e-5)
    nothing = selection.of_unread(scores, torch.zeros_like(unread), none, means)
    some = attend(query, products(keys, values), None, AttentionSpec(1.0), None, nothing)[0]
    assert torch.allclose(some, attend(query, products(keys, values), None, AttentionSpec(1.0))[0], atol=1e-6)


def test_codes_make_the_mass_of_a_page_too_high_by_about_the_excess():
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn((1, 32 * 4000, 16), generator=generator), torch.randn((1, 16), generator=generator)
    index = key_codes.encode(keys, 32, 2)
    exact, found = torch.einsum("qd,hnd->hn", query, keys) * 0.5, key_codes.token_scores(query, index, 32, 2, 0.5)[0]
    too_high = (found.logsumexp(-1) - exact.logsumexp(-1)).item()
    expected = key_codes.excess(query, index, 32, 2, 0.5).mean().item()
    assert expected > 0.05
    assert too_high == pytest.approx(expected, rel=0.25)


# ---- Every mode over 8-bit pages is dense attention over K/V that numpy quantized


@pytest.mark.parametrize(("row", "unified"), [*((row, True) for row in CORE), ("full-resident", False)])
def test_every_mode_is_dense_attention_over_rounded_pages(row, unified):
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
def test_half_precision_windows_caps_and_learned_sinks(row, dtype):
    run = EightBitRun.of_row(row, toy(MIXED, page=8, dtype=dtype, unified=row == "full"))
    run.prefill(90, chunk=50)
    run.step(20)
    run.check()


@pytest.mark.parametrize("row", ["full", "streaming", "freeze", "sync", "speculative"])
def test_pages_of_both_kinds_are_one_conversation_through_every_switch_pinned_messages_too(row):
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
def test_steps_that_ask_nothing_read_the_same(row):
    mode, params = ROWS[row]
    made = toy(("plain", "plain"), kv_heads=2, group=2, page=8)
    runs = [EightBitRun(made, mode, **params) for _ in range(2)]
    for run, path in zip(runs, (lambda kv: None, as_on_a_gpu), strict=True):
        run.prefill(90)
        path(run.kv)
        run.step(15)
        run.check()


def test_what_is_empty_and_exact_again_is_the_plain_pool():
    run = EightBitRun(toy(("plain", "plain"), page=8, unified=True), "full")
    run.prefill(50)
    run.set(False)
    run.truncate(0)
    run.prefill(20)
    run.step(5)
    run.check()
    assert type(run.kv.state.host) is HostPool
