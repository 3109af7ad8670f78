"""Rates of a device: bytes over the best time."""

from __future__ import annotations

import pytest
import torch

from kvchat.bench import decode

CPU = torch.device("cpu")


def test_rates_are_bytes_over_the_best_time(monkeypatch):
    monkeypatch.setattr(decode, "READ_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(decode, "GATHER_TOKENS", {"cpu": 2**12})
    monkeypatch.setattr(decode, "_timed", lambda run, device: 1e-3)
    # A copy reads and writes, so it counts twice and is the better of the two here.
    assert decode.read(CPU, torch.float32) == pytest.approx(2 * 2**22 / 1e-3 / 1e9)
    assert decode.gather(CPU, torch.float32) == pytest.approx(2**12 * 2 * 512 / 4 / 1e-3 / 1e9, rel=0.1)


def test_every_timed_run_but_the_first_counts():
    runs = []
    assert decode.seconds(lambda: runs.append(1), CPU) > 0
    assert len(runs) == 1 + decode.RUNS


@pytest.mark.cuda
def test_roofline_of_a_gpu():
    assert decode.kernel_gather(torch.device("cuda"), torch.float32) == {}
    found = decode.measure(torch.device("cuda"), torch.bfloat16)
    assert found.read > found.to_device > 0
    assert found.gather > 0.5 * found.to_device
    assert found.to_host > 0
