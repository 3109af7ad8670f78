"""tokens: codes and scores match torch; the best tokens are selected, and tokens that stay keep their slot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_kv import assert_near, noise

from kvchat.kv.memory.device_slots import EMPTY
from kvchat.kv.ops import key_codes
from kvchat.kv.ops.selection import NOTHING, assign_slots, mask_of, unread_part
from kvchat.kv.ops.triton import tokens as kernels

NEAR = 1e-5  # relative: weights that rounding cannot tell apart
# KV heads, group, d_k, bits, dtype, page, tokens stored, k, most recent tokens visible
CASES = [
    (2, 1, 64, 2, torch.bfloat16, 32, 300, 40, None),
    (1, 2, 80, 4, torch.float16, 8, 50, 20, None),
    (2, 3, 96, 2, torch.float32, 16, 230, 60, 120),
    (1, 4, 128, 2, torch.bfloat16, 32, 97, 12, None),
    (2, 7, 24, 4, torch.float32, 8, 90, 20, 40),
    (1, 8, 256, 2, torch.float16, 32, 160, 200, None),
    (1, 9, 40, 2, torch.bfloat16, 8, 140, 1, None),
]


def index_of(keys, page, bits, tokens):
    """The codes of ``keys``, with room for ``tokens``."""
    found = key_codes.encode(keys, page, bits)
    more = (len(found), -(-tokens // page) - found.shape[1], found.shape[2])
    return torch.cat((found, torch.zeros(more, dtype=torch.int32, device=keys.device)), 1)


@pytest.mark.parametrize(("heads", "group", "d", "bits", "dtype", "page", "n", "k", "sight"), CASES, ids=str)
def test_key_codes_match_torch(heads, group, d, bits, dtype, page, n, k, sight, device):
    stored = noise(0, device, dtype, heads, n + 5, d + 3)
    stored = stored.to(key_codes.edge_dtype(dtype)).to(dtype)  # Triton's interpreter truncates where a GPU rounds
    stored[0, :page] = stored[0, 0, 0]  # every channel of the page is constant
    stored[-1, page : 2 * page, : d // 2] = 7 * torch.arange(page, device=device)[:, None].to(dtype)  # halves
    keys = stored[:, 2 : n + 2, :d]  # not contiguous
    assert torch.equal(kernels.encode(keys, page, bits), key_codes.encode(keys, page, bits))


@pytest.mark.parametrize(("heads", "group", "d", "bits", "dtype", "page", "n", "k", "sight"), CASES, ids=str)
def test_scores_and_selections_match_torch(heads, group, d, bits, dtype, page, n, k, sight, device):
    room = n + 3 * page
    index = index_of(noise(0, device, dtype, heads, n, d), page, bits, room)
    query = 2 * noise(1, device, dtype, heads * group, d)
    token = torch.arange(index.shape[1] * page, device=device)
    hidden = token >= n // page * page
    if sight is not None:
        hidden |= token <= n - sight
    masked = (token < 3) | (token > n - page) | (token == n // 2)  # sinks, a window and a pinned token
    resident = torch.full((heads, k + 7), EMPTY, dtype=torch.int32, device=device)[:, :k]
    for step in range(2):
        exact = key_codes.token_scores(query, index, page, bits, d**-0.5)
        assert_near(kernels.token_scores(query, index, page, bits, d**-0.5), exact, torch.float32)
        means = noise(9, device, dtype, heads, index.shape[1], d // 2 + group)
        by = query, index, bits, d**-0.5, hidden, masked, resident
        placed, unread = kernels.choose_tokens(*by, means, page)
        assert placed.dtype == torch.int64
        check(exact, hidden, masked, resident, placed)
        check_unread(exact, hidden | masked, placed, key_codes.excess(query, index, page, bits, d**-0.5), means, unread)
        assert step or kernels.choose_tokens(*by, None, page)[1] is None
        resident.copy_(placed)
        query = (query + 0.4 * noise(2 + step, device, dtype, heads * group, d)).to(dtype)


def check(scores, hidden, masked, resident, placed):
    """The best tokens that may be selected, each once, as many as fit; tokens that stay keep their slot."""
    weights = scores.double().masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
    may = set((~(hidden | masked)).nonzero().flatten().tolist())
    for head in range(len(scores)):
        before, after = resident[head].tolist(), placed[head].tolist()
        chosen = {token for token in after if token != EMPTY}
        assert len(chosen) == len(after) - after.count(EMPTY) == min(len(after), len(may))
        assert chosen <= may
        if chosen != may:
            worst = min(float(weights[head, token]) for token in chosen)
            assert worst >= max(float(weights[head, token]) for token in may - chosen) * (1 - NEAR)
        assert all(now == token for token, now in zip(before, after, strict=True) if token in chosen)


def check_unread(scores, masked, placed, excess, means, measured):
    """What the tokens that could be selected and were not would add; next to nothing if all were selected."""
    unread = ~(masked | mask_of(placed, len(masked)))
    assert measured.dtype == torch.float32
    assert measured.isfinite().all()
    some = unread.any(1)
    assert (measured[~some][..., -1] == NOTHING).all()
    expected = unread_part(scores, unread, excess, means)
    assert_near(*(x.where(some[:, None, None], 0) for x in (measured, expected)), torch.float32)


@settings(max_examples=8)
@given(data=st.data())
def test_the_first_of_equal_tokens_are_selected(data):
    """Even if weights underflow to zero, with any tokens resident."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    page, pages, k = 8, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    n = page * pages
    levels = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0]), min_size=n, max_size=n))
    keys = torch.tensor(levels, device=device).view(1, n, 1).expand(1, n, 16).contiguous()
    keys[:, ::page], keys[:, 1::page] = -1, 1  # two bits know -1, -1/3, 1/3 and 1
    index = key_codes.encode(keys, page, 2)
    query = torch.full((1, 16), data.draw(st.sampled_from([0.1, 100.0])), device=device)
    held = data.draw(st.permutations(range(n)))[:k]
    resident = torch.tensor([[*held, *[EMPTY] * (k - len(held))]], dtype=torch.int32, device=device)
    masked = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), device=device)
    nothing = torch.zeros_like(masked)
    placed, _ = kernels.choose_tokens(query, index, 2, 1.0, nothing, masked, resident, None, page)
    scores = key_codes.token_scores(query, index, page, 2, 1.0)[0, 0]
    weights = (scores - scores.max()).exp().tolist()
    ranked = sorted((token for token in range(n) if not masked[token]), key=lambda token: (-weights[token], token))
    assert sorted(placed[0].tolist()) == sorted(ranked[:k] + [EMPTY] * max(0, k - len(ranked)))
    wanted = torch.tensor([ranked[:k] + [EMPTY] * max(0, k - len(ranked))], device=device)
    expected = assign_slots(wanted, resident.long(), n, reuse=True)
    stays = torch.isin(resident.long(), wanted) & (resident >= 0)
    assert torch.equal(placed[stays], expected[stays])


@pytest.mark.parametrize("k", [30, 128])
def test_selections_from_several_chunks_are_merged(k, device, monkeypatch):
    """The best of the best of chunks are the best of all."""
    sizes = {"FEWEST": 512, "MOST": 512, "CHUNK": 256, "PER_WARP": 128, "PER_WARP_OF_CHUNK": 64, "PAGES": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(kernels, name, value)
    page, n = 32, 1600
    index = index_of(noise(0, device, torch.float16, 2, n, 16), page, 2, n)
    query = 3 * noise(1, device, torch.float16, 4, 16)
    nothing = torch.zeros(n, dtype=torch.bool, device=device)
    resident = torch.full((2, k), EMPTY, dtype=torch.int32, device=device)
    means = noise(2, device, torch.float16, 2, n // page, 24)
    placed, unread = kernels.choose_tokens(query, index, 2, 0.25, nothing, nothing, resident, means, page)
    scores, excess = (of(query, index, page, 2, 0.25) for of in (key_codes.token_scores, key_codes.excess))
    check(scores, nothing, nothing, resident, placed)
    check_unread(scores, nothing, placed, excess, means, unread)


def test_slots_are_emptied_if_nothing_may_be_selected(device):
    index = index_of(noise(0, device, torch.float16, 1, 64, 32), 32, 4, 96)
    hidden = torch.ones(96, dtype=torch.bool, device=device)
    resident = torch.tensor([[5, 9, EMPTY]], dtype=torch.int32, device=device)
    query = noise(1, device, torch.float16, 2, 32)
    for masks in ((hidden, ~hidden), (~hidden, hidden)):
        means = torch.ones((1, 3, 8), device=device)
        placed, unread = kernels.choose_tokens(query, index, 4, 0.2, *masks, resident, means, 32)
        assert placed.tolist() == [[EMPTY] * 3]
        assert (unread[..., -1] == NOTHING).all()
        assert unread.isfinite().all()
