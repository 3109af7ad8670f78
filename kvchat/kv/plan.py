"""Memory before it is taken: what a mode needs against what is free."""

from __future__ import annotations

import os

import torch

from kvchat.errors import DoesNotFitError
from kvchat.kv.modes.base import Mode

# Left to the framework, kernels' workspaces and the screen: 6 % of what is free, at most this much.
MARGIN = 768 * 2**20


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _page_cache()


def check(mode: Mode, tokens: int, device: torch.device, given_back: int = 0) -> None:
    """Refuse a mode whose slots for ``tokens`` tokens do not fit; leaving the old one frees ``given_back`` bytes.

    Raises:
        DoesNotFitError: with the numbers.
    """
    free = free_bytes(device) + given_back
    usable = free - min(MARGIN, free * 6 // 100)
    needed = mode.nbytes(tokens)
    if needed > usable:
        raise DoesNotFitError(
            f"The {mode.name} mode does not fit.",
            f"Its K/V of {tokens:,} tokens takes {_gib(needed)} on {device}, {_gib(usable)} are free.",
            "Take a mode with a budget (streaming, speculative), a smaller budget or a shorter conversation.",
        )


def _page_cache() -> int:
    """Bytes of file cache the system gives back on demand; 0 where it does not tell."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024 - int(fields["MemFree"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
