"""Memory that runs out while the engine works: recognized, and explained to a person."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvchat.errors import OutOfMemoryError
from kvchat.kv.manager import KVManager
from kvchat.units import size

# Of torch's allocator for host memory, C++, the CUDA driver and its libraries: errors that have only their text.
NO_MEMORY = re.compile(
    r"DefaultCPUAllocator|std::bad_alloc|(CUDA|HIP)( error|\])?: out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)
ASKED_FOR = re.compile(r"tried to allocate (\d+) bytes")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that device or host memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(NO_MEMORY.search(str(error)))


@contextmanager
def explained(kv: KVManager, doing: str) -> Iterator[None]:
    """Say what ran out of memory while ``doing`` something; what was stored before is kept.

    Raises:
        OutOfMemoryError: instead of the errors of Python, the system and torch.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"Memory ran out while {doing}.",
            f"The {kv.mode.name} mode holds {_held(kv)} for {kv.total:,} stored tokens: {_shortage(error)}",
            "What is stored is kept, what is missing is read again. Take a smaller budget or the streaming mode.",
        ) from error


def _held(kv: KVManager) -> str:
    """K/V where memory ran out; without a GPU all of it lies in the host pool."""
    if kv.state.device.type == "cpu":
        return f"{size(kv.state.host.nbytes, 2)} of K/V in RAM"
    return f"{size(kv.device_bytes, 2)} of K/V on {kv.state.device}"


def _shortage(error: BaseException) -> str:
    """The allocation that failed, in the allocator's own words where they are meant for people."""
    text = str(error)
    if asked := ASKED_FOR.search(text):
        return f"another {size(int(asked[1]), 2)} could not be had."
    return (text.splitlines() or ["no more memory"])[0]
