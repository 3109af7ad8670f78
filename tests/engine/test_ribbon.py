"""The ribbon: where each stored token lies, and what of it was read or recalled just now."""

from __future__ import annotations

import sys

import pytest
from support.fake_nvml import FakeGpu, FakeNvml
from support.filled_session import SPECULATIVE, STREAMING, filled
from support.tiny_runner import loaded

from kvchat.config.modes import mode_names
from kvchat.engine import session as session_module
from kvchat.engine.metrics import PcieReading, histogram
from kvchat.engine.session import Session
from kvchat.errors import OutOfMemoryError
from kvchat.kv.transfer import RecallTime
from kvchat.nvml import GpuReader, PcieTraffic
from kvchat.protocol.figures import MAX_RIBBON_CELLS
from kvchat.protocol.messages import RECALL_EDGES_MS, RecallBin


def test_full_is_on_the_device_and_read_everywhere(session):
    snapshot = filled(session, 100).snapshot()
    assert (snapshot.ribbon, snapshot.attended, snapshot.active) == ("DDDD", "9999", 100)


def test_streaming_shows_sinks_window_and_what_is_out_of_reach(session):
    filled(session, 300, "streaming", **STREAMING)
    for token in range(21):
        session.step(token)
    snapshot = session.snapshot()
    assert snapshot.ribbon == "SXXXXXXWWWW"
    assert snapshot.attended == "90000009999"
    assert snapshot.extras["dropped"] == 321 - 128
    assert snapshot.active == 129


def test_speculative_shows_what_was_recalled_just_now_and_what_is_on_the_host(session):
    filled(session, 640, "speculative", **SPECULATIVE)
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
def test_what_comes_back_in_other_modes_is_shown_as_well(session, mode, params):
    filled(session, 500, mode, **params)
    shown = ""
    for token in range(12):
        session.step(100 + 50 * token)
        shown += session.snapshot().ribbon
    assert "R" in shown


def test_what_streaming_dropped_comes_back_with_full(session):
    filled(session, 300, "streaming", **STREAMING)
    session.step(5)
    assert "R" not in session.snapshot().ribbon
    session.switch("full")
    session.step(6)
    assert session.snapshot().ribbon[2:5] == "RRR"


def test_cells_grow_with_the_conversation_and_stay_within_the_limit(session, monkeypatch):
    filled(session, 600)
    monkeypatch.setattr("kvchat.engine.metrics.MAX_RIBBON_CELLS", 8)
    snapshot = session.snapshot()
    assert (snapshot.cell_tokens, len(snapshot.ribbon)) == (96, 7)
    assert MAX_RIBBON_CELLS == 1024


# ---- What each layer and KV head reads and holds is what attention read, and recall falls into the bins of its time


PARAMS = {"streaming": {"budget": 128, "sink": 32}, "speculative": {"budget": 192, "sink": 32, "window": 64}}


def test_what_is_counted_is_what_attention_read_in_every_mode(model):
    session = Session(model)
    session.prefill([(7 * i) % 4000 + 10 for i in range(400)])
    assert {tokens for heads in session.details().read for tokens in heads} == {400}, "a prefill reads everything"
    for mode in mode_names():
        session.switch(mode, **PARAMS.get(mode, {}))
        for token in range(4):
            session.step(token)
        shown = session.details()
        attended = [tuple(session.attended(layer).sum(1).tolist()) for layer in range(session.info.layers)]
        assert list(shown.read) == attended, mode
        assert shown.total == session.total
        if mode == "full":
            assert not any(map(any, shown.held)), "full mode reads what is stored where it lies on a CPU"
        if mode in PARAMS:
            assert all(0 < tokens < shown.total for tokens in shown.held[-1])
    session.close()


def test_recall_falls_into_the_bins_of_its_time():
    assert histogram([]) == ()
    edge = RECALL_EDGES_MS[2] / 1000
    bins = histogram([RecallTime(0.00005, 0.00005), RecallTime(edge, 0), RecallTime(edge, edge / 2), RecallTime(9, 3)])
    assert [one.steps for one in bins] == [1, 0, 0, 2, *[0] * (len(RECALL_EDGES_MS) - 4), 1]
    assert (bins[3].hidden_ms, bins[3].exposed_ms) == pytest.approx((0.75, 0.25))
    assert bins[-1] == RecallBin(1, 6000, 3000)


def test_pcie_traffic_is_measured_beside_the_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu()))
    assert PcieReading(None).latest() == PcieTraffic()
    reading = PcieReading(GpuReader("0"))
    assert reading.latest() == PcieTraffic(), "the first one has only begun"
    reading._thread.join(60)
    assert reading.latest() == PcieTraffic(to_device=11_200_000_000, to_host=300_000_000)
    reading._thread.join(60)


# ---- Looking at a session where memory is short: kvchat's own error, and the session goes on


LOOKS = {
    "snapshot": lambda session: session.snapshot(),
    "details": lambda session: session.details(),
    "attended": lambda session: session.attended(0),
    "prices": lambda session: session.prices(),
}


def no_memory(*_):
    raise RuntimeError("std::bad_alloc")


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_without_memory_is_explained(monkeypatch, look):
    session = Session(loaded("llama", num_hidden_layers=2))
    session.prefill([1, 2, 3])
    with monkeypatch.context() as short:
        for part, name in (
            (session._metrics, "snapshot"),
            (session._metrics, "details"),
            (session._switcher, "prices"),
        ):
            short.setattr(part, name, no_memory)
        short.setattr(session_module, "attended", no_memory)
        with pytest.raises(OutOfMemoryError, match="stored"):
            LOOKS[look](session)
    LOOKS[look](session)
    session.close()
