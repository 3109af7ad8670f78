"""Rank: this process among those that share a model, and the sums that they make together."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor

# How long one rank may wait for another, which may still be reading its weights from a cold disk. One that ended is
# noticed at once.
PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Rank:
    """Number ``number`` of ``count`` processes; the first is the engine's own."""

    number: int
    count: int

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of ``whole``, a copy, so that the rest can be freed."""
        return whole.chunk(self.count, dim)[self.number].clone()

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor``, in which the sum over all ranks is put; each must ask for it."""
        torch.distributed.all_reduce(tensor)
        return tensor


def join(meeting: str, rank: Rank, device: torch.device) -> Rank:
    """Meet the other ranks of a model at the file ``meeting``; returns once all are there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it listens where the host's name leads
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.FileStore(meeting, rank.count),
        rank=rank.number,
        world_size=rank.count,
        timeout=PATIENCE,
    )
    return rank


def leave() -> None:
    """Leave the other ranks, if any were met."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
