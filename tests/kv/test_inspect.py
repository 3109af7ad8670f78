"""Inspecting slots: wrong slots are found, and displayed counts match the masks."""

import itertools

import pytest
import torch
from support.dense_attention import softmax
from support.integrity import check_integrity
from support.kv_run import Run
from support.mode_rows import FIRST, MIXED
from support.toy_model import toy

from kvchat.kv import inspect
from kvchat.kv.inspect import attended, attended_counts, held_per_head, read_per_head, read_tokens


def run_of(row: str, kinds: tuple[str, ...] = MIXED) -> Run:
    return Run.of_row(row, toy(kinds, kv_heads=4, page=8)).begun(150, 10)


@pytest.mark.parametrize(
    "row", ["full", "full-resident", "streaming-slack", "speculative-four-bits", "freekv-odd", "sync-two", "freeze"]
)
def test_counts_match_the_masks(row):
    run = run_of(row)
    state = run.kv.state
    masks = torch.stack([attended(state, layer) for layer in range(len(MIXED))])
    assert torch.equal(attended_counts(state), masks.sum((0, 1)))
    assert torch.equal(read_per_head(state), masks.sum(2))
    before = read_tokens(state)
    run.step()
    read = [attended(state, layer).sum(1).float().mean() for layer in range(len(MIXED))]
    assert read_tokens(state) - before == pytest.approx(float(torch.stack(read).mean()))
    run.prefill(5)  # a prefill reads everything
    masks = torch.stack([attended(state, layer) for layer in range(len(MIXED))])
    assert torch.equal(attended_counts(state), masks.sum((0, 1)))


def test_held_counts_match_the_slot_tables():
    state = run_of("streaming").kv.state
    (slots,) = state.slots
    assert (held_per_head(state) == (slots.table >= 0).sum()).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda slots, slot: slots.values(2)[1, slot].add_(1), "layer 2, head 1: values"),
        (lambda slots, slot: slots.keys(1)[3, slot].add_(1), "layer 1, head 3: keys"),
        (lambda slots, slot: slots.table[..., slot].fill_(1000), "layer 0, head 0: a token beyond the end"),
        (lambda slots, slot: slots.table[..., slot].sub_(1), "layer 0, head 0: values"),
        (
            lambda slots, slot: slots.attended[..., slot].copy_(slots.attended[..., slot + 1]),
            "layer 0, head 0: a token read twice",
        ),
    ],
)
def test_slots_with_wrong_contents_are_found(wrong, message):
    state = run_of("streaming", ("plain",) * 3).kv.state
    check_integrity(state)
    (slots,) = state.slots
    wrong(slots, int(slots.table[0, 0].argmax()) - 5)
    with pytest.raises(AssertionError, match=message):
        check_integrity(state)


# ---- Coverage: the share of dense attention in float64 that falls on the tokens read


WITHIN = 1e-5


def expected(run: Run, layer: int) -> torch.Tensor:
    """Shares of all stored tokens in float64, from the keys that the model projected: ``[H, total]``."""
    spec, total = run.toy.specs[layer], len(run.ids)
    seen = torch.arange(total) > total - 1 - (spec.window or total)
    by_query = softmax(run.query[layer], run.keys[layer], seen.expand(run.toy.geometry.kv_heads, -1), spec)
    shares = by_query.view(run.toy.geometry.kv_heads, -1, total).mean(1)
    return shares / shares.sum(-1, keepdim=True)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("row", FIRST.values())
def test_coverage_matches_dense_attention_over_read_tokens(row, unified, monkeypatch):
    monkeypatch.setattr(inspect, "CHUNK", 3)
    run = Run.of_row(row, toy(MIXED, kv_heads=4, group=3, page=8, unified=unified)).begun(150)
    for steps in (1, 6, 9):
        run.step(steps)
        for layer in range(len(MIXED)):
            shares, read = expected(run, layer), attended(run.kv.state, layer)
            covered = inspect.covered(run.kv.state, layer)
            assert (covered - (shares * read).sum(-1)).abs().max() < WITHIN
            assert (inspect.attention_shares(run.kv.state, layer) - shares).abs().max() < WITHIN
            assert torch.allclose(inspect.covered(run.kv.state, layer, slice(2, 3)), covered[2:3])
            reads_all = read.sum(-1) == (shares > 0).sum(-1)
            assert (covered[reads_all] - 1).abs().max() < WITHIN if reads_all.any() else covered.max() < 1


@pytest.mark.parametrize("read", [0, 1, 2, 5, 8, 12])
def test_best_tokens_and_pages_match_a_brute_force_search(read):
    shares = torch.rand((2, 10), generator=torch.Generator().manual_seed(read)).softmax(-1)
    number = torch.tensor([read, read])
    best = [max(map(sum, itertools.combinations(row.tolist(), min(read, 10)))) for row in shares]
    assert torch.allclose(inspect.covered_by_tokens(shares, number), torch.tensor(best, dtype=torch.float32))
    pages = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    masses = torch.tensor([[float(row[list(page)].sum()) for page in pages] for row in shares])
    wanted = [max(map(sum, itertools.combinations(row.tolist(), min(read // 4, 3)))) for row in masses]
    wanted = wanted if read < 10 else [1.0, 1.0]
    assert torch.allclose(inspect.covered_by_pages(shares, number, 4), torch.tensor(wanted, dtype=torch.float32))


# ---- coverage sampled while an answer is decoded


class Clock:
    """A clock that the test sets; a sample of a layer takes ``sample_s`` seconds."""

    def __init__(self, sample_s: float) -> None:
        self.now, self.sample_s = 0.0, sample_s

    def __call__(self) -> float:
        return self.now


def watched(
    run: Run, monkeypatch: pytest.MonkeyPatch, sample_s: float = 0.001
) -> tuple[inspect.CoverageWatch, Clock, list]:
    clock, sampled, covered = Clock(sample_s), [], inspect.covered

    def taking_time(state, layer, heads):
        sampled.append((layer, heads.start))
        clock.now += clock.sample_s
        return covered(state, layer, heads)

    monkeypatch.setattr(inspect, "covered", taking_time)
    return inspect.CoverageWatch(run.kv.state, clock), clock, sampled


def test_heads_are_sampled_in_turn_and_the_newest_sample_counts(monkeypatch):
    run = Run.of_row("streaming", toy(MIXED, kv_heads=6, page=8)).begun(150)
    exact, (watch, clock, sampled) = inspect.covered, watched(run, monkeypatch)
    watch.sample()
    assert (sampled, watch.share, watch.lowest) == ([], None, None), "a prefill reads everything"
    expected = {}
    for _ in range(20):
        run.step()
        clock.now += 1
        before = len(sampled)
        watch.sample()
        for layer, head in sampled[before:]:
            expected[layer, head] = exact(run.kv.state, layer, slice(head, head + inspect.HEADS))
        shares = torch.cat(list(expected.values()))
        assert watch.share == pytest.approx(float(shares.mean()), abs=1e-6)
    assert set(expected) == {(layer, head) for layer in range(len(MIXED)) for head in (0, 4)}
    assert len(sampled) >= 20
    assert 0 < watch.lowest <= watch.share < 1
    assert watch.has_seen_enough
    before = watch.share
    watch.begin()
    assert watch.lowest == watch.share == before, "samples carry over to the next answer"
    watch.restart()
    assert (watch.share, watch.lowest, watch.has_seen_enough) == (None, None, False)


@pytest.mark.parametrize("sample_s", [0.0001, 0.002, 0.05])
def test_sampling_stays_within_its_share_of_time(sample_s, monkeypatch):
    run = Run.of_row("streaming", toy(("plain",) * 3, kv_heads=2, page=8)).begun(150)
    watch, clock, sampled = watched(run, monkeypatch, sample_s)
    run.step()
    for _ in range(4000):
        clock.now += 0.02
        watch.sample()
    assert len(sampled) * sample_s <= inspect.COST * clock.now + inspect.LOOKS * sample_s
    assert len(sampled) >= min(4000, 0.9 * inspect.COST * clock.now / max(sample_s, inspect.FIRST_S)) - inspect.LOOKS


def test_one_slow_sample_does_not_stop_sampling(monkeypatch):
    run = Run.of_row("streaming", toy(("plain",) * 3, kv_heads=2, page=8)).begun(150)
    watch, clock, sampled = watched(run, monkeypatch)
    run.step()
    for n in range(600):
        clock.sample_s = 100.0 if n == 100 else 0.001
        clock.now += 0.02
        watch.sample()
    assert len(sampled) > 30


def test_full_mode_is_covered_without_reading_keys(monkeypatch):
    run = Run.of_row("full", toy(MIXED, kv_heads=4, page=8)).begun(150, 1)
    monkeypatch.setattr(inspect, "weights", None)
    watch = inspect.CoverageWatch(run.kv.state)
    watch.sample()
    assert (watch.share, watch.lowest) == (1, 1)
