"""Memory that runs out at chosen operations of torch.

The short form of the tests that use it takes sample places. The long form takes every place on the CPU, and every
``FAKE_CUDA_STRIDE``-th on the fake CUDA device, where each costs a second; ``KVCHAT_TEST_FAULTS=10`` every tenth::

    KVCHAT_TEST_FAULTS=all python -m pytest -n auto -k faults -o junit_family=xunit1 --junitxml=FILE

How often memory ran out stands in the file, as each test's property ``injected``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ASKED = os.environ.get("KVCHAT_TEST_FAULTS", "0").replace("all", "1")
EVERYWHERE = int(_ASKED)  # the long form takes places so far apart; 0 in the short form
FAKE_CUDA_STRIDE = 20


class MemoryRunsOut(TorchDispatchMode):
    """Count the operations that may allocate, which are all but views; those numbered ``places`` find no memory.

    Where memory stays ``short`` none after them finds any either.
    """

    def __init__(self, *places: int, short: bool = False) -> None:
        super().__init__()
        self.places, self.short, self.count = places, short, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.count += 1
            if self.count in self.places or (self.short and self.count > max(self.places)):
                raise torch.OutOfMemoryError(f"injected at {self.count}")
        return func(*args, **(kwargs or {}))


def places_of(count: int, stride: int, case: str) -> Iterator[tuple[int, ...]]:
    """Where memory runs out among ``count`` operations: once, and twice in a row.

    At every ``stride``-th place of those that the long form takes, else at two that depend on the ``case``.
    """
    dice, stride = random.Random(case), stride * EVERYWHERE
    chosen = range(dice.randint(1, min(stride, count)), count + 1, stride) if EVERYWHERE else ()
    for place in chosen or sorted(dice.sample(range(1, count + 1), 2)):
        yield (place,)
        yield (place, place + 1)
