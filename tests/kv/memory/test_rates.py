"""Rates are measured with what memory there is."""

from __future__ import annotations

import torch

from kvchat.kv.memory import available, rates

CPU = torch.device("cpu")


def test_little_memory_is_measured_with_less_of_it(monkeypatch):
    taken = list[int]()

    def seconds(run, device):
        taken.append(run().nbytes)
        return 1.0

    monkeypatch.setattr(rates, "seconds", seconds)
    monkeypatch.setattr(available, "free_bytes", lambda device: 2**22)
    rates.read(CPU, torch.float32, 2**26)
    assert 0 < max(taken) <= 2**20


def test_where_nothing_can_be_pinned_the_link_is_measured_without(monkeypatch):
    def refused(tensor):
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    assert rates.link(CPU, True, 2**16) > 0
