"""Snapshots and receipts report what the KV store holds and did."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_nvml import FakeGpu, FakeNvml, GiB
from support.loads import load_in
from support.memory_faults import MemoryRunsOut

from kvchat.config.modes import mode_names
from kvchat.engine import metrics
from kvchat.engine import session as session_module
from kvchat.engine.metrics import MetricsCollector, PcieReading, histogram
from kvchat.engine.session import Session
from kvchat.errors import OutOfMemoryError
from kvchat.kv import inspect
from kvchat.kv.transfer import RecallTime
from kvchat.nvml import GpuReader, PcieTraffic
from kvchat.protocol.figures import MAX_RIBBON_CELLS, RIBBON, Gpu
from kvchat.protocol.messages import RECALL_EDGES_MS, Finished, Prefilled, RecallBin, Sampling, Text, Turn, Variant

STREAMING = {"budget": 128, "sink": 32, "R": 1, "sigma": 0, "delta": 0}
# With pages, which are fetched and evicted on a CPU too.
FOX = (Turn("user", "Once upon a time there was a little fox. " * 40),)
SPECULATIVE = {"budget": 192, "sink": 32, "window": 64, "unit": "page", "index": "bounds"}


def fill(session: Session, tokens: int, mode: str = "full", **params: Any) -> Session:
    """Store ``tokens`` tokens in ``session``, and switch to a mode."""
    session.prefill([(7 * i) % 4000 + 10 for i in range(tokens)])
    session.switch(mode, **params)
    return session


def mean_attended(session: Session) -> float:
    layers = range(session.info.layers)
    return sum(float(session.attended(layer).sum()) for layer in layers) / (session.info.layers * session.info.kv_heads)


@pytest.mark.parametrize(
    ("mode", "params"), [("full", {}), ("streaming", STREAMING), ("speculative", SPECULATIVE | {"first_full": False})]
)
def test_active_is_the_mean_of_attended_and_fits_the_digits(session, mode, params):
    empty = session.snapshot()
    assert (empty.total, empty.ribbon, empty.attended, empty.active) == (0, "", "", 0)
    assert (empty.tokens_per_s, empty.recall_hit_rate) == (None, None)
    fill(session, 500, mode, **params)
    for token in range(12):
        session.step(token)
    snapshot = session.snapshot()
    assert snapshot.active == pytest.approx(mean_attended(session))
    assert (snapshot.total, snapshot.mode, snapshot.cell_tokens) == (512, mode, 32)
    assert len(snapshot.ribbon) == len(snapshot.attended) == 16
    low = sum(int(digit) * 3.2 for digit in snapshot.attended)
    assert low <= snapshot.active <= low + 16 * 3.2
    assert set(snapshot.ribbon) <= set(RIBBON)


def test_recall_metrics_are_of_the_current_mode_only(session):
    fill(session, 640, "speculative", **SPECULATIVE)
    for token in range(12):
        session.step(50 * token)
    before = session.snapshot()
    assert None not in (before.recall_hit_rate, before.recall_ms_p95)
    session.switch("streaming", **STREAMING)
    for _ in range(2):
        after = session.snapshot()
        assert (after.recall_hit_rate, after.recall_ms_p95, after.step_bytes) == (None, None, 0.0)
        session.step(7)
    assert after.recalled_bytes == before.recalled_bytes > 0


def test_speed_is_of_the_current_mode_only(session):
    answer = session._metrics.begin(10, 0)
    answer.token_times = [0.0, 1.0, 2.0]
    assert session.snapshot().tokens_per_s == 1.0
    session._metrics.note_switch("full", "sync", 0)
    assert session.snapshot().tokens_per_s is None
    answer.token_times += [10.0, 10.5]
    assert session.snapshot().tokens_per_s == 2.0


def test_noting_a_switch_needs_no_memory(session):
    fill(session, 300, "speculative", **SPECULATIVE)
    session.step(5)
    with MemoryRunsOut(1, short=True):
        session._metrics.note_switch("full", "speculative", 0)


def test_excluded_work_is_not_in_the_totals(session):
    fill(session, 640, "speculative", **SPECULATIVE | {"tau": 2.0})
    session.step(5)
    before = session.snapshot()
    with session._metrics.excluded():
        for token in range(6):
            session.step(100 * token)
    during = session.snapshot()
    assert (during.recalled_bytes, during.corrections) == (before.recalled_bytes, before.corrections)
    for token in range(6):
        session.step(90 * token)
    after = session.snapshot()
    assert after.recalled_bytes > before.recalled_bytes
    assert after.corrections == 7 * before.corrections > 0


def test_receipt_counts_what_happened(bundled):
    session = fill(Session(bundled), 400, "speculative", **SPECULATIVE)
    session.truncate(0)
    turns = (Turn("user", "Tell me a short story. " * 60),)
    events = list(session.answer(turns, Sampling(temperature=0, max_new_tokens=12)))
    stats, kv = events[-1].stats, session._kv
    assert stats.prompt_tokens == events[0].prompt_tokens > 300
    assert stats.generated_tokens == len(session.token_ids)
    assert stats.kv_device_bytes == kv.device_bytes
    assert stats.kv_host_bytes == kv.state.host.nbytes
    assert stats.active_tokens < stats.total_tokens
    # The first of eight layers is full, the others read the budget at most.
    assert stats.active_tokens <= (stats.total_tokens + 7 * 192) / 8
    assert 0 <= stats.recall_hit_rate <= 1
    assert stats.recalled_bytes >= 0
    heads = (session.info.layers - 1) * session.info.kv_heads
    assert stats.corrected_share == pytest.approx(stats.corrections / (len(session.token_ids) * heads), rel=0.2)
    assert 0 < stats.corrected_share <= 1
    assert stats.mean_cosine == pytest.approx(kv.mode.report().cosine / kv.state.steps)
    assert 0 < stats.recall_ms_p50 <= stats.recall_ms_p95
    assert stats.exposed_ms_p95 == stats.recall_ms_p95
    assert stats.recall_bytes_per_s > 0
    assert stats.decode_tokens_per_s > 0
    assert stats.prefill_tokens_per_s > 0
    assert stats.ttft_s > 0


def test_mean_cosine_is_of_the_answer_and_unknown_after_a_switch(session):
    session.switch("speculative", **SPECULATIVE)
    turns = (Turn("user", "Tell me a short story. " * 60),)
    *_, first = session.answer(turns, Sampling(temperature=0, max_new_tokens=12))
    before, steps = session._kv.mode.report().cosine, session._kv.state.steps
    turns += (Turn("assistant", first.text), Turn("user", "And then?"))
    *_, second = session.answer(turns, Sampling(temperature=0, max_new_tokens=12))
    kv = session._kv
    assert second.stats.mean_cosine == pytest.approx((kv.mode.report().cosine - before) / (kv.state.steps - steps))
    assert -1 <= second.stats.mean_cosine <= 1
    answer = session._metrics.begin(0, 0)
    session.switch("speculative", tau=0.5)
    session.step(5)
    assert session._metrics.stats(answer).mean_cosine is None


def test_recall_rate_counts_only_timed_steps(session):
    fill(session, 640, "speculative", **SPECULATIVE, tau=2.0)
    assert session.snapshot().recall_bytes_per_s is None
    before, timer = session.snapshot().recalled_bytes, session._kv.state.transfer.timer
    for token in range(4):
        session.step(90 * token)
    timer.timed, timer.seconds = timer.timed - 3, 0.5  # a host that ran ahead timed one of four
    after = session.snapshot()
    assert after.recall_bytes_per_s == pytest.approx((after.recalled_bytes - before) / 4 / 0.5, rel=0.02)


def test_recalled_bytes_match_the_moved_pages(bundled):
    session = fill(Session(bundled), 640, "speculative", **SPECULATIVE, tau=-2)
    before, moved = session.snapshot().recalled_bytes, 0
    slots = session._kv.state.slots[-1]
    for token in range(15):
        held = [set(row) for row in slots.pages.flatten(0, 1).tolist()]
        session.step(token + 50)
        now = [set(row) for row in slots.pages.flatten(0, 1).tolist()]
        moved += sum(len(b - a) for a, b in zip(held, now, strict=True))
    k_and_v = 2 * 32 * 64 * 4
    assert moved > 0
    assert session.snapshot().recalled_bytes - before == moved * k_and_v


@pytest.mark.parametrize("known", [True, False])
def test_snapshot_names_the_gpu_even_without_nvml(session, monkeypatch, known):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(uuid="GPU-ab")) if known else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="RTX", uuid="ab"))
    kv = session._kv
    with monkeypatch.context() as patch:
        patch.setattr(kv.state, "device", torch.device("cuda"))
        collector = MetricsCollector(kv, session._runner.recurrent, weight_bytes=1, context=2)
    readings = (GiB, 24 * GiB, 3 * GiB, 45, 61, 123.4) if known else ()
    assert collector.snapshot(0).gpu == Gpu("RTX", *readings)


@pytest.fixture
def sample_every_step(monkeypatch):
    monkeypatch.setattr(inspect, "COST", 1e6)


def run_answer(session: Session, tokens: int = 20) -> Finished:
    *_, finished = session.answer(FOX, Sampling(temperature=0, max_new_tokens=tokens))
    return finished


def test_answers_report_their_coverage(model, sample_every_step):
    session = Session(model, load_in("streaming", {"budget": 64}))
    stats = run_answer(session).stats
    assert 0 < stats.lowest_coverage <= stats.coverage < 0.99
    assert session.snapshot().coverage == stats.coverage
    exact = [inspect.covered(session._kv.state, layer) for layer in range(model.layers)]
    assert stats.coverage == pytest.approx(float(torch.cat(exact).mean()), abs=0.1)
    switched = session.switch("full")
    assert switched.mode == "full"
    assert session.snapshot().coverage is None, "it was of another mode"
    stats = run_answer(session).stats
    assert (stats.coverage, stats.lowest_coverage, session.snapshot().coverage) == (None, None, None)
    session.switch("streaming")
    run_answer(session)
    *_, finished = session.answer((Turn("user", "Hi"),), Sampling(temperature=0, max_new_tokens=4))
    assert finished.stats.reused_tokens > 0, "prompts begin alike"
    assert (finished.stats.lowest_coverage, session.snapshot().coverage) == (None, None), "of another conversation"


def test_reopened_conversation_has_no_metrics_of_the_last_one(model, sample_every_step):
    session = Session(model, load_in("streaming", {"budget": 64}))
    list(session.answer(FOX, Sampling(max_new_tokens=20), conversation="before"))
    assert session.snapshot().coverage
    list(session.resume("after", FOX))
    now = session.snapshot()
    assert (now.tokens_per_s, now.ttft_s, now.coverage) == (None, None, None)


def test_reads_of_a_prompt_are_marked_until_the_first_token(model):
    session = Session(model, load_in("streaming", {"budget": 64}))
    events = session.answer(FOX, Sampling(max_new_tokens=4))
    marked = [session.snapshot().is_prompt for event in events if isinstance(event, Prefilled | Text)]
    assert marked[0]
    assert not marked[-1]
    assert session.snapshot().active < session.snapshot().total


def test_answer_continues_without_memory_for_a_coverage_sample(model, sample_every_step, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(inspect, "weights", full)
    session = Session(model, load_in("streaming", {"budget": 64}))
    finished = run_answer(session)
    assert finished.reason in ("length", "eos")
    assert finished.stats.generated_tokens > 1
    assert finished.stats.coverage is None


@pytest.mark.parametrize(("budget", "warned"), [(64, True), (1024, False)])
def test_low_coverage_has_a_badge(model, sample_every_step, monkeypatch, budget, warned):
    monkeypatch.setattr(metrics, "ENOUGH_COVERED", 0.98)
    session = Session(model, load_in("streaming", {"budget": budget}))
    run_answer(session)
    assert [badge.partition(":")[0] for badge in session.snapshot().badges] == ["low coverage"] * warned


def test_comparison_leaves_the_coverage_unchanged(model, sample_every_step):
    session = Session(model, load_in("streaming", {"budget": 64}))
    run_answer(session)
    before = session.snapshot().coverage
    variants = (Variant("full"), Variant("streaming", {"budget": 96}))
    *_, compared = session.compare((Turn("user", "Hello there. " * 80),), variants, Sampling(max_new_tokens=12))
    full, streaming = compared.runs
    assert full.stats.coverage is None
    assert 0 < streaming.stats.lowest_coverage < 1
    assert session.snapshot().coverage == before


def test_typical_token_time_counts_drafts_and_ignores_stalls(session, monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(metrics, "time", clock)
    answer = MetricsCollector(session._kv, session._runner.recurrent, 0, 0).begin(10, 0)
    for at in range(20):
        clock.now += 5.0 if at in (8, 12) else 0.2
        answer.token()
        for _ in range(3):
            clock.now += 1e-6
            answer.token(is_draft=True)
    assert answer.typical_s(8) == pytest.approx(0.05, rel=1e-3)
    assert answer.typical_s(32) is None


# ---- The ribbon: where each stored token is, and which were just read or recalled


def test_full_shows_all_tokens_on_the_device_and_read(session):
    snapshot = fill(session, 100).snapshot()
    assert (snapshot.ribbon, snapshot.attended, snapshot.active) == ("DDDD", "9999", 100)


def test_streaming_shows_sinks_window_and_dropped_tokens(session):
    fill(session, 300, "streaming", **STREAMING)
    for token in range(21):
        session.step(token)
    snapshot = session.snapshot()
    assert snapshot.ribbon == "SXXXXXXWWWW"
    assert snapshot.attended == "90000009999"
    assert snapshot.extras["dropped"] == 321 - 128
    assert snapshot.active == 129


def test_speculative_shows_recalled_tokens_and_those_on_the_host(session):
    fill(session, 640, "speculative", **SPECULATIVE)
    session.step(5)
    session.snapshot()
    session.step(700)
    first, second = session.snapshot(), session.snapshot()
    assert first.ribbon[0] == second.ribbon[0] == "S"
    assert second.ribbon.endswith("WWW")
    assert "R" in first.ribbon
    assert "R" not in second.ribbon  # nothing moved in between
    assert set(second.ribbon[1:-3]) <= {"D", "H"}


@pytest.mark.parametrize(
    ("mode", "params"), [("sync", {"budget": 160, "m": 1}), ("freeze", {"profile": "paper", "k": 0.5})]
)
def test_sync_and_freeze_show_recalled_tokens(session, mode, params):
    fill(session, 500, mode, **params)
    shown = ""
    for token in range(12):
        session.step(100 + 50 * token)
        shown += session.snapshot().ribbon
    assert "R" in shown


def test_tokens_dropped_by_streaming_return_with_full(session):
    fill(session, 300, "streaming", **STREAMING)
    session.step(5)
    assert "R" not in session.snapshot().ribbon
    session.switch("full")
    session.step(6)
    assert session.snapshot().ribbon[2:5] == "RRR"


def test_cells_grow_with_the_conversation_and_stay_within_the_limit(session, monkeypatch):
    fill(session, 600)
    monkeypatch.setattr("kvchat.engine.metrics.MAX_RIBBON_CELLS", 8)
    snapshot = session.snapshot()
    assert (snapshot.cell_tokens, len(snapshot.ribbon)) == (96, 7)
    assert MAX_RIBBON_CELLS == 1024


# ---- What each layer and KV head reads and holds, and the histogram of recall times


def test_details_match_what_attention_read_in_every_mode(session):
    fill(session, 400)
    assert {tokens for heads in session.details().read for tokens in heads} == {400}, "a prefill reads everything"
    budgeted = {"streaming": STREAMING, "speculative": SPECULATIVE}
    for mode in mode_names():
        session.switch(mode, **budgeted.get(mode, {}))
        for token in range(4):
            session.step(token)
        shown = session.details()
        attended = [tuple(session.attended(layer).sum(1).tolist()) for layer in range(session.info.layers)]
        assert list(shown.read) == attended, mode
        assert shown.total == session.total
        if mode == "full":
            assert not any(map(any, shown.held)), "on a CPU full mode reads the host pool in place"
        if mode in budgeted:
            assert all(0 < tokens < shown.total for tokens in shown.held[-1])


def test_recall_is_binned_by_its_time():
    assert histogram([]) == ()
    edge = RECALL_EDGES_MS[2] / 1000
    bins = histogram([RecallTime(0.00005, 0.00005), RecallTime(edge, 0), RecallTime(edge, edge / 2), RecallTime(9, 3)])
    assert [one.steps for one in bins] == [1, 0, 0, 2, *[0] * (len(RECALL_EDGES_MS) - 4), 1]
    assert (bins[3].hidden_ms, bins[3].exposed_ms) == pytest.approx((0.75, 0.25))
    assert bins[-1] == RecallBin(1, 6000, 3000)


def test_pcie_traffic_is_measured_in_the_background(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu()))
    assert PcieReading(None).latest() == PcieTraffic()
    reading = PcieReading(GpuReader("0"))
    assert reading.latest() == PcieTraffic(), "the first reading has only begun"
    reading._thread.join(60)
    assert reading.latest() == PcieTraffic(to_device=11_200_000_000, to_host=300_000_000)
    reading._thread.join(60)


# ---- Inspecting a session when memory is short: kvchat's own error, and the session continues


def test_inspection_without_memory_raises_a_clear_error(session, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("std::bad_alloc")

    session.prefill([1, 2, 3])
    metrics, switcher = session._metrics, session._switcher
    places = (metrics, "snapshot"), (metrics, "details"), (switcher, "prices"), (session_module, "attended")
    inspections = session.snapshot, session.details, session.prices, lambda: session.attended(0)
    for (owner, name), inspect_session in zip(places, inspections, strict=True):
        with monkeypatch.context() as short:
            short.setattr(owner, name, no_memory)
            with pytest.raises(OutOfMemoryError, match="stored"):
                inspect_session()
        inspect_session()
