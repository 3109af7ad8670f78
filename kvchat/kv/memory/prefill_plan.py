"""Plans a prefill: the device memory that it takes, and the number of tokens of one forward."""

from __future__ import annotations

import torch

from kvchat.errors import DoesNotFitError
from kvchat.kv.attention import PREFILL_WORKSPACE
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import available, budget
from kvchat.units import size

# Tokens of one prefill forward on a GPU. With fewer the matrices are too small to be busy; with more a person who
# cancels waits too long, and earlier K/V is read only a little less often.
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)


def staging_bytes(geometry: Geometry, stored: int, new: int) -> int:
    """Device bytes of ``prefill_staging.StagedPrefill`` for ``new`` tokens after ``stored``."""
    pages = geometry.pages(stored + new)
    changed = pages - stored // geometry.page
    page_bytes = geometry.kv_heads * 2 * geometry.page * geometry.row_bytes
    return (pages + geometry.pages(stored) + changed) * page_bytes


def prefill_bytes(geometry: Geometry, stored: int, new: int, token_bytes: int) -> int:
    """Device bytes that one forward of ``new`` tokens after ``stored`` takes beside the weights and the mode's slots.

    ``token_bytes`` is what the model's layers take per new token.
    """
    return staging_bytes(geometry, stored, new) + new * token_bytes + PREFILL_WORKSPACE


def prefill_chunk(geometry: Geometry, stored: int, new: int, token_bytes: int, device: torch.device) -> int:
    """Number of the ``new`` tokens after ``stored`` that one forward takes; ``token_bytes`` as above.

    The largest that takes at most half of the free memory: the rest allows for fragmentation.

    Raises:
        DoesNotFitError: not even the fewest fit.
    """
    free = available.usable(budget.free_bytes(device))

    def needed(chunk: int) -> int:
        last = min(chunk, new)
        return prefill_bytes(geometry, stored + new - last, last, token_bytes)

    least = CHUNKS[0]
    if needed(least) > free:
        raise DoesNotFitError(
            "There is no room to read the prompt.",
            f"{new:,} tokens after {stored:,} stored ones need {size(needed(least), 2)} on {device}, read {least} at a "
            f"time: {size(staging_bytes(geometry, stored, new), 2)} for one layer's K/V on its way, the rest for the "
            f"layers' intermediate results. {size(free, 2)} are free.",
            "Take a mode with a budget (streaming, speculative), a smaller budget or a shorter prompt.",
        )
    return max((chunk for chunk in CHUNKS if needed(chunk) <= free // 2), default=least)
