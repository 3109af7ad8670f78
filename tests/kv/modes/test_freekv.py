"""FreeKV: corrections, reuse, pinned pages, moves and refusals. The sets themselves: test_every_mode.py."""

import pytest
import torch
from support.kv_run import Run
from support.kv_steps import use_gpu_path
from support.toy_model import toy

from kvchat.errors import DoesNotFitError, UsageError

SMALL = {"budget": 80, "sink": 8, "window": 24}
PAGES = {"unit": "page", "index": "bounds"}


def run_of(tau: float, steps: int = 60, **kwargs) -> Run:
    run = Run(toy(("plain", "plain", "plain"), kv_heads=2, group=2, page=8, **kwargs), "speculative", tau=tau, **SMALL)
    run.prefill(150)
    run.step(steps)
    return run


@pytest.mark.parametrize(("tau", "least", "most"), [(2.0, 1, 1), (-2.0, 0, 0), (0.7, 0.01, 0.99)])
def test_corrected_heads_are_counted(tau, least, most):
    run = run_of(tau, steps=30)
    assert run.kv.state.transfer.totals.corrections == run.reference.corrections
    assert least <= run.reference.corrections / (30 * 2 * 2) <= most


@pytest.mark.parametrize(
    ("budget", "split"), [(64, (4, 60, 0)), (256, (4, 92, 5)), (512, (4, 156, 11)), (2048, (4, 540, 47))]
)
def test_the_budget_is_split_into_sinks_window_and_pages(budget, split):
    mode = Run(toy(("plain", "plain")), "speculative", budget=budget, **PAGES).kv.mode
    assert (mode.sink, mode.window, mode.k) == split
    assert mode.sink + mode.window + mode.k * 32 == budget


@pytest.mark.parametrize(
    ("given", "enough"),
    [({"budget": 64}, 68), ({"budget": 200, "sink": 160}, 224), ({"budget": 250, "sink": 192}, 288)],
)
def test_a_budget_without_room_for_a_page_warns(given, enough):
    run = Run(toy(("plain", "plain")), "speculative", **PAGES, **given).begun(300)
    (badge,) = run.kv.mode.report().badges
    assert badge.startswith("recalls nothing: ")
    assert f"{enough} tokens" in badge
    again = Run(toy(("plain", "plain")), "speculative", **PAGES, **given | {"budget": enough}).begun(300)
    assert (again.kv.mode.k, again.kv.mode.report().badges) == (1, ())
    assert Run(toy(("plain", "plain")), "speculative", **PAGES, **given | {"budget": enough - 1}).kv.mode.k == 0


def test_a_small_budget_that_reads_everything_does_not_warn():
    run = Run(toy(("plain", "plain")), "speculative", budget=64, **PAGES).begun(40)
    assert run.kv.mode.report().badges == ()


def test_the_paper_profile_gives_sinks_and_window_a_quarter_each():
    mode = Run(toy(("plain", "plain")), "speculative", budget=512, profile="paper").kv.mode
    assert (mode.sink, mode.window, mode.k) == (128, 128, 8)
    published = Run(toy(("plain", "plain")), "speculative", profile="paper").kv.mode
    assert (published.sink, published.window, published.k, published.first) == (512, 512, 32, 1)


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("tau", [-2.0, 0.7, 2.0])
def test_fully_pinned_pages_take_no_page_slots(tau, on_a_gpu):
    run = run_of(tau, steps=3)
    if on_a_gpu:
        use_gpu_path(run.kv)
    favorites = run.kv.state.slots[-1].pages[0, 0].tolist()  # the pages that a head scores highest
    run.pin(sorted(token for page in favorites for token in range(page * 8, page * 8 + 8)))
    run.step(20)
    run.check()
    pages = run.kv.state.slots[-1].pages
    assert not torch.isin(pages, torch.tensor(favorites)).any()
    assert (pages >= 0).all()


def test_pages_of_sinks_and_pinned_tokens_take_no_page_slots():
    run = Run(
        toy(("plain", "plain"), kv_heads=2, group=2, page=8), "speculative", budget=80, sink=12, window=24, **PAGES
    )
    run.prefill(150)
    run.pin([12, 13, 14, 15])
    run.step(20)
    run.check()
    assert not (run.kv.state.slots[-1].pages == 1).any()
    run.pin([12, 13, 15])
    run.step(5)
    run.check()


def test_steps_work_with_every_candidate_pinned():
    run = run_of(0.7, steps=3)
    run.pin(list(range(8, run.kv.total)))
    run.step(20)
    run.check()


@pytest.mark.parametrize("tau", [-2.0, 2.0])
def test_only_new_pages_move(tau):
    run = Run(toy(("plain", "plain"), kv_heads=2, group=2, page=8), "speculative", tau=tau, **SMALL).begun(200)
    slots, transfer = run.kv.state.slots[-1], run.kv.state.transfer
    for _ in range(50):
        before, moved = [set(row) for row in slots.pages[0].tolist()], transfer.totals.moved
        run.step()
        after = [set(row) for row in slots.pages[0].tolist()]
        new = sum(len(b - a) for a, b in zip(before, after, strict=True))
        assert transfer.totals.moved - moved == new * slots.geometry.page
    assert 0 < transfer.totals.moved < transfer.totals.wanted


def test_refusals_state_the_numbers():
    model = toy()
    with pytest.raises(UsageError, match=r"64.*40 \+ 32 = 72"):
        Run(model, "speculative", budget=64, sink=40, window=32, **PAGES)
    with pytest.raises(UsageError, match="32"):
        Run(model, "speculative", budget=64, sink=4, window=31, **PAGES)
    with pytest.raises(DoesNotFitError, match="second layer"):
        Run(toy(("plain",)), "speculative", **PAGES)


@pytest.mark.parametrize("tau", [-2.0, 0.7, 2.0])
def test_wanted_tokens_are_counted_once(tau):
    """A correction replaces tokens that are already counted; the hit rate used to count them twice (audit, 3)."""
    run = run_of(tau, steps=1)
    slots, transfer = run.kv.state.slots[-1], run.kv.state.transfer
    before = transfer.totals.wanted
    run.step(20)
    assert transfer.totals.wanted - before == 20 * 2 * 2 * slots.layout.pages * slots.geometry.page


def test_corrected_heads_and_the_mean_cosine_are_reported():
    run = run_of(0.7, steps=0)
    cosines = []
    for _ in range(40):
        last = [query.double() for query in run.query]
        run.step()
        now = torch.stack([query.double() for query in run.query[1:]])
        cosines.append(torch.cosine_similarity(now, torch.stack(last[1:]), -1).mean())
    stats = run.kv.mode.report().stats
    assert stats["heads corrected"] == f"{run.reference.corrections / (40 * 2 * 2):.0%}"
    assert stats["mean C"] == pytest.approx(float(torch.stack(cosines).mean()), abs=2e-3)
