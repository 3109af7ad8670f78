"""Rank: this process among those that share a model, and the sums that they make together in a forward.

A rank whose forward fails, because its memory ran out say, goes on with the sums of that forward, of zeros: the others
wait for them deep in a library. Afterwards all of them say whether they finished, and where one did not nobody has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor

# How long one rank may wait for another, which may still be reading its weights from a cold disk. One that ended is
# noticed at once.
PATIENCE = timedelta(minutes=10)
PIECE = 2**20  # numbers summed at a time: a rank that goes on with sums needs no memory but for so many


class OtherRankFailedError(Exception):
    """A forward was given up because another rank could not finish it."""


@dataclass(frozen=True)
class Rank:
    """Number ``number`` of ``count`` processes; the first is the engine's own."""

    number: int
    count: int

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of ``whole``, a copy, so that the rest can be freed."""
        return whole.chunk(self.count, dim)[self.number].clone()


class Sums:
    """The sums over all ranks of a forward, of ``widths`` numbers for each of its tokens.

    ``spare [PIECE]`` is what a rank sums that failed, on the model's device and in its dtype.
    """

    def __init__(self, rank: Rank, widths: Sequence[int], spare: Tensor) -> None:
        self.rank = rank
        self._widths = widths
        self._spare = spare
        self._done = 0
        self._failed = torch.zeros(1, dtype=torch.int32)

    def add(self, tensor: Tensor) -> Tensor:
        """``tensor``, contiguous, in which the sum over all ranks is put; each must ask for it."""
        pieces = torch.split(tensor.view(-1), PIECE)
        self._done += 1  # from here on it is made or the process ends
        for piece in pieces:
            _reduce(piece)
        return tensor

    @contextmanager
    def together(self, tokens: int) -> Iterator[None]:
        """The block is a forward of ``tokens`` tokens, which all ranks finish or none.

        Raises:
            OtherRankFailedError: another one did not; else what the block raises.
        """
        self._done = 0
        try:
            yield
        except Exception:
            for width in self._widths[self._done :]:
                for start in range(0, tokens * width, PIECE):
                    _reduce(self._spare[: tokens * width - start].zero_())
            self._count_failed(1)
            raise
        if self._count_failed(0):
            raise OtherRankFailedError("Another GPU's process could not do its part.")

    def _count_failed(self, own: int) -> int:
        count = self._failed.numpy()  # on the host, where no device is waited for
        count[0] = own
        _reduce(self._failed)
        return int(count[0])


def _reduce(tensor: Tensor) -> None:
    try:
        torch.distributed.all_reduce(tensor)
    except Exception as error:  # noqa: BLE001  # of the library and of what it waits by
        sys.exit(f"kvchat: the ranks cannot go on together: {error}")  # which of them summed nobody knows


def join(meeting: str, rank: Rank, device: torch.device) -> Rank:
    """Meet the other ranks of a model at the file ``meeting``; returns once all are there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it listens where the host's name leads
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
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
