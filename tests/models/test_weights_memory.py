"""A model's weights are moved one behind the other, and are what they were."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import tiny_models
from torch import nn

from kvchat.kv.memory.pinned import HUGE_PAGE
from kvchat.models import reading
from kvchat.models.fuse import modules
from kvchat.models.reading import defragment

STATUS = Path("/proc/self/status")


# Prints by how many bytes the process grows at most.
FREEING = """
import sys, torch
from kvchat.models import reading

def taken():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon:"))

torch.ones(31 * 2**20, dtype=torch.uint8)  # once this is freed, glibc keeps what is smaller
small, grown = [], []
with reading.mmap_large_allocations():
    before = taken()
    for size in range(8, 16):
        large = torch.ones(size * 2**20, dtype=torch.uint8)
        small.append(torch.ones(2**10))
        del large
        grown.append(taken() - before)
sys.stdout.write(str(max(grown)))
"""


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False), nn.Embedding(5, 3)).to(dtype)


def addresses(module: nn.Module) -> list[tuple[int, int]]:
    """Of matrices first, as they are moved."""
    weights = sorted(module.parameters(), key=torch.Tensor.dim, reverse=True)
    return [(weight.data_ptr(), weight.nbytes) for weight in weights]


def room(size: int) -> int:
    """Bytes from one weight of ``size`` to the next: as torch's own each begins at a multiple of 64."""
    return (size + 63) // 64 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_lie_in_order_and_keep_their_values(dtype):
    plain, defragmented = model(dtype), model(dtype)
    defragment(defragmented)
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), defragmented.parameters(), strict=True))
    at = addresses(defragmented)
    assert at[0][0] % HUGE_PAGE == 0
    assert all(begin + room(size) == following for (begin, size), (following, _) in itertools.pairwise(at))


def test_no_more_than_a_piece_is_there_twice(monkeypatch):
    defragmented = model()
    monkeypatch.setattr(reading, "PIECE", 256)
    taken: list[int] = []
    genuine = reading.aligned
    monkeypatch.setattr(reading, "aligned", lambda size: taken.append(size) or genuine(size))
    defragment(defragmented)
    assert max(taken) <= 256
    assert sum(taken) == sum(room(size) for _, size in addresses(defragmented))


def test_what_is_larger_than_a_piece_stays(monkeypatch):
    defragmented = model()
    monkeypatch.setattr(reading, "PIECE", 100)
    before = {weight: weight.data_ptr() for weight in defragmented.parameters()}
    defragment(defragmented)
    for weight, address in before.items():
        assert (weight.data_ptr() == address) == (weight.nbytes > 100)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_what_is_merged_lies_together_and_is_not_kept_twice(monkeypatch, name):
    """Projections of Qwen2 have biases; pieces end anywhere."""
    monkeypatch.setattr(reading, "PIECE", 80_000)
    merged = tiny_models.fresh(name)
    defragment(merged)
    before = {weight.untyped_storage().data_ptr() for weight in merged.parameters()}
    modules.fuse(merged, None)
    assert {weight.untyped_storage().data_ptr() for weight in merged.parameters() if weight.dim() > 1} <= before


def test_tied_weights_stay_tied():
    tied = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
    tied[1].weight = tied[0].weight
    defragment(tied)
    assert tied[1].weight is tied[0].weight


def test_tensors_freed_meanwhile_are_the_systems_again():
    """Each is larger than the room of the one before, which a small tensor closes.

    In a process of its own: glibc fills the holes that other tests left first, whatever it is told.
    """
    if not STATUS.exists():
        pytest.skip("the system does not tell")
    child = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True, check=True, timeout=600)
    assert int(child.stdout) < 16 * 2**20  # of 92; else 28 to 91
