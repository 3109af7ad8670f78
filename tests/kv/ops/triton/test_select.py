"""select: scores, heads to correct and open pages match stock torch; the best pages are selected and stay in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grids import sampled
from support.random_kv import LAYERS, SHAPES, TOLERANCE, assert_near, geometry_of, noise, sides

from kvchat.kv.memory.device_slots import EMPTY, Layout
from kvchat.kv.modes.page_index import PageBounds
from kvchat.kv.ops import selection
from kvchat.kv.ops.selection import Candidates
from kvchat.kv.ops.triton.select import MOST_CHOSEN, MOST_PAGES

NEAR = 1e-6  # relative: weights that rounding cannot tell apart


def ops_of(shape, device, dtype=torch.float32):
    return [side.ops for side in sides(geometry_of(shape, dtype), device, exact=True)]


@pytest.mark.parametrize(("shape", "dtype"), sampled(SHAPES, [*TOLERANCE]), ids=str)
def test_page_scores_match_torch(shape, dtype, device):
    g = geometry_of(shape, dtype)
    expected, measured = sides(g, device, tokens=290, exact=True)
    bounds = PageBounds(g, device)
    bounds.reserve(500)
    bounds.refresh(expected.host)
    full = g.pages(290)
    query = noise(1, device, dtype, g.q_heads, g.d_k)
    scores = measured.ops.page_scores(query, bounds.of(1), 0.3)
    assert scores.dtype == torch.float32
    assert not bool(scores.isnan().any())
    exact = expected.ops.page_scores(query.float(), bounds.of(1)[:, :full].float(), 0.3)
    assert_near(scores[:, :, :full], exact, torch.float32)


@pytest.mark.parametrize(("shape", "dtype"), sampled(SHAPES, [*TOLERANCE]), ids=str)
def test_heads_to_correct_match_torch(shape, dtype, device):
    g = geometry_of(shape, dtype)
    expected, measured = ops_of(shape, device, dtype)
    query = noise(1, device, dtype, g.q_heads, g.d_k)
    turn = torch.linspace(0, 2, g.q_heads, device=device)[:, None]
    before = (query + turn * noise(2, device, dtype, g.q_heads, g.d_k)).to(dtype)
    for tau in (-1.0, 0.7, 0.9, 2.0):
        flags = measured.needs_correction(query, before, tau)
        assert flags.dtype == torch.bool
        assert torch.equal(flags, expected.needs_correction(query.float(), before.float(), tau))
    assert not bool(measured.needs_correction(query, torch.zeros_like(query), -0.5).any())


def check_choice(scores, candidates, resident, flagged, placed):
    """The best candidates, each once; pages that stay keep their slot; heads not flagged do not change."""
    k = resident.shape[1]
    weights = scores.double().masked_fill(candidates.masked, -torch.inf).softmax(-1).mean(1)
    for head in range(len(scores)):
        before, after = resident[head].tolist(), placed[head].tolist()
        if flagged is not None and not flagged[head]:
            assert after == before
            continue
        chosen = {page for page in after if page != EMPTY}
        may = set((~candidates.masked).nonzero().flatten().tolist())
        assert len(chosen) == k - after.count(EMPTY) == min(k, len(may))
        assert chosen <= may
        if chosen != may:
            worst, best_left = (
                pick(float(weights[head, page]) for page in of) for pick, of in ((min, chosen), (max, may - chosen))
            )
            assert worst >= best_left * (1 - NEAR)
        assert all(now == page for page, now in zip(before, after, strict=True) if page in chosen)


@pytest.mark.parametrize(("pages", "k"), [(5, 3), (3, 9), (70, 1), (200, 20), (1000, 70), (9, 9)])
def test_the_best_pages_are_selected_and_keep_their_slots(pages, k, device):
    _, ops = ops_of("odd", device)
    resident = torch.full((3, k), EMPTY, device=device)
    for step in range(4):
        scores = 3 * noise(step, device, torch.float32, 3, 8, pages)
        flagged = None if step % 2 == 0 else torch.arange(3, device=device) != 1
        last = torch.tensor(pages * (step + 1) // 4, device=device)
        candidates = Candidates.between(min(1, step), last, pages)
        placed = ops.choose(scores, candidates, resident, flagged)
        assert placed.dtype == torch.int64
        check_choice(scores.cpu(), Candidates.between(min(1, step), last.cpu(), pages), resident, flagged, placed)
        resident = placed


@settings(max_examples=25)
@given(data=st.data())
def test_ties_and_underflow_still_fill_the_selection(data):
    """If weights tie or underflow, there are still as many pages as wanted, each once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, ops = ops_of("one", device)
    pages, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    levels = data.draw(st.lists(st.sampled_from([0.0, 1.0, -500.0]), min_size=pages, max_size=pages))
    held = data.draw(st.permutations(range(pages)))[:k]
    resident = torch.tensor([[*held, *[EMPTY] * (k - len(held))]], device=device)
    first, last = data.draw(st.integers(0, 5)), torch.tensor(data.draw(st.integers(-1, pages)), device=device)
    scores = torch.tensor(levels, device=device).view(1, 1, -1)
    candidates = Candidates.between(first, last, pages)
    check_choice(scores, candidates, resident, None, ops.choose(scores, candidates, resident))


def test_selections_too_large_for_one_program_are_left_to_torch(device, monkeypatch):
    _, ops = ops_of("one", device)
    calls = []
    monkeypatch.setattr(
        "kvchat.kv.ops.torch_ops.top_pages", lambda *args: calls.append(1) or selection.top_pages(*args)
    )
    for pages, k, expected in ((MOST_PAGES + 1, 4, 1), (500, MOST_CHOSEN + 1, 2), (300, 4, 2)):
        resident = torch.full((1, k), EMPTY, device=device)
        candidates = Candidates.between(0, torch.tensor(pages, device=device), pages)
        placed = ops.choose(noise(0, device, torch.float32, 1, 1, pages), candidates, resident)
        assert bool((placed >= 0).all())
        assert len(calls) == expected


def test_opened_pages_match_torch(device):
    g = geometry_of("odd", torch.float16)
    layout = Layout(0, LAYERS, 4, 20, pages=7, shared=False)
    both = sides(g, device, layout)
    for first, last, layers in ((0, 100, slice(None)), (9, 60, slice(1, 2)), (9, 8, slice(0, 1)), (3, -5, slice(None))):
        for side in both:
            (slots,) = side.slots
            slots.pages.copy_((torch.arange(slots.pages.numel()) * 5 % 13 - 1).view(slots.pages.shape))
            side.ops.open_pages(slots, layers, first, torch.tensor(last, device=device))
        assert torch.equal(both[1].slots[0].table, both[0].slots[0].table)
