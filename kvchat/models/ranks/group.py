"""A rank, one of the processes that share a model, and the sums over all ranks in a forward.

If a rank's forward fails, for example because memory ran out, it adds zeros to the remaining sums of that forward,
because the others are waiting for them deep in a library. Then each rank says whether it finished, and if one did not,
all undo the forward.
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

# How long a rank waits for another, which may still be reading its weights from a cold disk. A dead rank is noticed
# immediately.
PATIENCE = timedelta(minutes=10)
PIECE = 2**20  # numbers summed at a time, and so the memory that a failed rank needs for its zeros


class OtherRankFailedError(Exception):
    """A forward was abandoned because another rank could not finish it."""


@dataclass(frozen=True)
class Rank:
    """Number ``number`` of ``count`` processes; number 0 is the engine's own."""

    number: int
    count: int

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return a copy of this rank's part of ``whole``, so that the rest can be freed."""
        return whole.chunk(self.count, dim)[self.number].clone()


class Sums:
    """Sums over all ranks in a forward; per token they have ``widths`` numbers, in this order.

    ``spare [PIECE]``, on the model's device and in its dtype, holds the zeros that a failed rank adds.
    """

    def __init__(self, rank: Rank, widths: Sequence[int], spare: Tensor) -> None:
        self.rank = rank
        self._widths = widths
        self._spare = spare
        self._done = 0
        self._failed = torch.zeros(1, dtype=torch.int32)

    def add(self, tensor: Tensor) -> Tensor:
        """Replace the contiguous ``tensor`` by its sum over all ranks and return it; all ranks must call this."""
        pieces = torch.split(tensor.view(-1), PIECE)
        self._done += 1  # from here on the sum completes or the process ends
        for piece in pieces:
            _reduce(piece)
        return tensor

    @contextmanager
    def together(self, tokens: int) -> Iterator[None]:
        """Run a forward of ``tokens`` tokens in the block, which either all ranks finish or none.

        Raises:
            OtherRankFailedError: another rank did not finish. Otherwise whatever the block raises.
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
            raise OtherRankFailedError("Another GPU's process could not finish this forward pass.")

    def _count_failed(self, own: int) -> int:
        count = self._failed.numpy()  # in RAM, so that no device is waited for
        count[0] = own
        _reduce(self._failed)
        return int(count[0])


def _reduce(tensor: Tensor) -> None:
    try:
        torch.distributed.all_reduce(tensor)
    except Exception as error:  # noqa: BLE001  # an error of the library or its transport
        sys.exit(f"kvchat: the processes cannot continue together: {error}")  # it is unknown which ranks have the sum


def join(meeting: str, rank: Rank, device: torch.device) -> Rank:
    """Meet the other ranks of a model through the file ``meeting``; return when all have joined."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it listens on the address of the host name
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.FileStore(meeting, rank.count),
        rank=rank.number,
        world_size=rank.count,
        timeout=PATIENCE,
    )
    return rank


def leave() -> None:
    """Leave the other ranks, if ``join`` was called."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
