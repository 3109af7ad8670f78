"""Memory that runs out while the engine works: recognized, and explained to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvchat.errors import OutOfMemoryError
from kvchat.kv.manager import KVManager
from kvchat.units import size

# torch's allocator for host memory raises a plain RuntimeError, which has only its text.
HOST_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that device or host memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or HOST_ALLOCATOR in str(error)


@contextmanager
def explained(kv: KVManager, doing: str) -> Iterator[None]:
    """Say what ran out of memory while ``doing`` something; what was stored before is kept.

    Raises:
        OutOfMemoryError: instead of torch's out-of-memory errors.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"Memory ran out while {doing}.",
            f"The {kv.mode.name} mode holds {size(kv.device_bytes, 2)} of K/V on {kv.state.device} for {kv.total:,} "
            f"stored tokens: {(str(error).splitlines() or ['no more memory'])[0]}",
            "What is stored is kept, what is missing is read again. Take a smaller budget or the streaming mode.",
        ) from error
