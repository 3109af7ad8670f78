"""What each layer and KV head reads and holds is what attention read, and recall falls into the bins of its time."""

from __future__ import annotations

import sys

import pytest
from support.fake_nvml import FakeGpu, FakeNvml

from kvchat.config.modes import mode_names
from kvchat.engine.metrics import PcieReading, histogram
from kvchat.engine.session import Session
from kvchat.kv.transfer import RecallTime
from kvchat.nvml import GpuReader, PcieTraffic
from kvchat.protocol.messages import RECALL_EDGES_MS, RecallBin

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
