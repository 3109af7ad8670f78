"""Memory before it is taken: what a mode needs against what is free."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvchat.errors import DoesNotFitError
from kvchat.kv.memory import available
from kvchat.units import size


class SwitchCost(NamedTuple):
    """The cost of entering a mode: bytes moved to the device (at most), its device bytes afterwards, and seconds.

    ``seconds`` follows from the rate of earlier fills, or of the link; None where neither was measured.
    """

    moved_bytes: int
    device_bytes: int
    seconds: float | None


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available.host_free()


def check_fits(mode: str, needed: int, tokens: int, device: torch.device, released: int = 0) -> None:
    """Refuse a mode that needs more device memory than is free once the old mode has ``released`` its own.

    Args:
        mode: its name.
        needed: bytes it takes for ``tokens`` tokens.
        tokens: tokens there is to be room for.
        device: where.
        released: bytes that leaving the old mode frees.

    Raises:
        DoesNotFitError: with the numbers.
    """
    usable = available.usable(free_bytes(device) + released)
    if needed > usable:
        raise DoesNotFitError(
            f"The {mode} mode does not fit.",
            f"Its K/V of {tokens:,} tokens takes {size(needed, 2)} on {device}, {size(usable, 2)} are free.",
            "Take a mode with a budget (streaming, speculative), a smaller budget or a shorter conversation.",
        )
