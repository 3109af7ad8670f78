"""Huge pages are asked for where they lie whole in the memory given, and nothing is lost."""

from __future__ import annotations

import torch

from kvchat.kv.memory import pinned
from kvchat.kv.memory.pinned import HUGE_PAGE


def test_only_whole_ones_are_asked_for(monkeypatch):
    asked: list[tuple[int, int]] = []

    class Libc:
        @staticmethod
        def madvise(address, size, advice):
            if advice == pinned.MADV_COLLAPSE:
                asked.append((address.value, size.value))

    monkeypatch.setattr(pinned, "_libc", lambda: Libc)
    memory = torch.zeros(4 * HUGE_PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE
    for begin, end, pages in ((0, 0, 0), (0, HUGE_PAGE - 1, 0), (0, HUGE_PAGE, 1), (1, 2 * HUGE_PAGE, 1)):
        asked.clear()
        pinned.use_huge_pages(memory[first + begin : first + end])
        assert sum(size for _, size in asked) == pages * HUGE_PAGE
        assert all(address % HUGE_PAGE == 0 for address, _ in asked)


def test_what_lies_there_stays():
    memory = torch.arange(HUGE_PAGE, dtype=torch.int32)
    pinned.use_huge_pages(memory)
    assert torch.equal(memory, torch.arange(HUGE_PAGE, dtype=torch.int32))


def test_where_there_is_no_such_call_nothing_happens(monkeypatch):
    monkeypatch.setattr(pinned, "_libc", lambda: None)
    pinned.use_huge_pages(torch.zeros(2 * HUGE_PAGE, dtype=torch.uint8))
