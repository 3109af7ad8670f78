"""Memory that runs out at chosen operations of torch.

The short form of the tests takes one place of some cases. ``KVCHAT_TEST_FAULTS=30`` takes 30 of every case, evenly
spaced, fewer where each costs seconds; ``all`` takes every place, for days. ``.ci/long`` runs the long form.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PLACES = float(os.environ.get("KVCHAT_TEST_FAULTS", "0").replace("all", "inf"))  # of a case; 0 in the short form
aten = torch.ops.aten
FREE = {aten.item.default, aten._local_scalar_dense.default, aten.zero_.default}  # need none, like sums over ranks


class HostMemoryError(RuntimeError):
    """What torch's allocator for host memory raises: a plain RuntimeError with this text."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
            f"you tried to allocate {nbytes} bytes. Error code 12 (Cannot allocate memory)"
        )


NO_MEMORY = torch.OutOfMemoryError, HostMemoryError


class MemoryRunsOut(TorchDispatchMode):
    """Counts the operations that may allocate, without ``FREE`` ones and views; those numbered ``places`` fail.

    If memory stays ``short`` all after the last of them fail too. Odd ones raise the error of a GPU's allocator, even
    ones that of the host's.
    """

    def __init__(self, *places: int, short: bool = False) -> None:
        super().__init__()
        self.places, self.short, self.count = places, short, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func not in FREE and func.namespace != "c10d":
            self.count += 1
            if self.count in self.places or (self.short and self.count > max(self.places)):
                gpu = torch.OutOfMemoryError(f"injected at {self.count}")
                raise gpu if self.count % 2 else HostMemoryError(self.count)
        return func(*args, **(kwargs or {}))


def places_of(count: int, case: str, cost: int = 1) -> Iterator[tuple[int, ...]]:
    """Where memory runs out among the ``count`` operations of a ``case``: at each place once, and twice in a row.

    In the long form the places are evenly spaced, and ``cost`` times fewer; a step of a tiny model costs 1.
    """
    if not count:
        return
    dice = random.Random(case)
    chosen: Iterable[int] = sorted(dice.sample(range(1, count + 1), 1))
    if PLACES:
        stride = max(round(count * cost / PLACES), 1)
        chosen = range(dice.randint(1, min(stride, count)), count + 1, stride)
    for place in chosen:
        yield (place,)
        yield (place, place + 1)


def out_of_memory(*_args: object, **_kwargs: object) -> None:
    """Raise what torch raises when a GPU's memory runs out."""
    raise torch.OutOfMemoryError("no memory left")
