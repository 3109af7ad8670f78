"""Memory that runs out at chosen operations of torch."""

from __future__ import annotations

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode

EVERYWHERE = os.environ.get("KVCHAT_TEST_FAULTS") == "all"  # the long form


class MemoryRunsOut(TorchDispatchMode):
    """Count the operations; those numbered ``places`` find no memory, and where it stays ``short`` none after them."""

    def __init__(self, *places: int, short: bool = False) -> None:
        super().__init__()
        self.places, self.short, self.count = places, short, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count in self.places or (self.short and self.count > max(self.places)):
            raise torch.OutOfMemoryError(f"injected at {self.count}")
        return func(*args, **(kwargs or {}))
