"""Memory before it is taken: what a mode needs against what is free."""

from __future__ import annotations

import torch

from kvchat.errors import DoesNotFitError
from kvchat.kv import memory
from kvchat.kv.modes.base import Mode


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return memory.host_free()


def check(mode: Mode, tokens: int, device: torch.device, given_back: int = 0) -> None:
    """Refuse a mode whose slots for ``tokens`` tokens do not fit; leaving the old one frees ``given_back`` bytes.

    Raises:
        DoesNotFitError: with the numbers.
    """
    free = free_bytes(device) + given_back
    usable = memory.usable(free)
    needed = mode.nbytes(tokens)
    if needed > usable:
        raise DoesNotFitError(
            f"The {mode.name} mode does not fit.",
            f"Its K/V of {tokens:,} tokens takes {_gib(needed)} on {device}, {_gib(usable)} are free.",
            "Take a mode with a budget (streaming, speculative), a smaller budget or a shorter conversation.",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
