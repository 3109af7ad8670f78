"""The shape of a model's K/V, and its size in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

PAGE = 32
# Minimum number of tokens by which memory for a conversation grows. On a GPU each growth costs a new graph.
GROWTH_HEADROOM = {"cpu": 128, "cuda": 2048}


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's K/V.

    ``d_k`` and ``d_v`` are the head sizes of keys and values. Stored rows have ``d = max(d_k, d_v)`` elements, so that
    K and V share one layout (the sizes differ only in MLA models, whose expanded K/V is large anyway). Memory for a
    conversation grows by at least ``headroom`` tokens. With ``unified`` memory (a CPU) the model reads the host pool
    in place.
    """

    layers: int
    q_heads: int
    kv_heads: int
    d_k: int
    d_v: int
    dtype: torch.dtype
    page: int = PAGE
    headroom: int = GROWTH_HEADROOM["cpu"]
    unified: bool = False

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @cached_property
    def d(self) -> int:
        return max(self.d_k, self.d_v)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row: K or V of one token and KV head in one layer."""
        return self.d * self.dtype.itemsize

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all KV heads and layers."""
        return self.layers * self.kv_heads * 2 * self.row_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page's K and V over all KV heads of one layer."""
        return self.page * self.kv_heads * 2 * self.row_bytes

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def grown(self, tokens: int) -> int:
        """Return the capacity to reserve for a growing conversation that now has ``tokens`` tokens, in whole pages."""
        return grown(tokens, self.headroom, self.page)

    def round_up(self, tokens: int) -> int:
        return self.pages(tokens) * self.page


def grown(tokens: int, headroom: int = GROWTH_HEADROOM["cpu"], page: int = PAGE) -> int:
    """Return the capacity to reserve for a conversation of ``tokens`` tokens, however it grew to that length.

    Capacity grows by a sixteenth, but at least by ``headroom``, in whole pages. More would slow down every step,
    because full mode's attention also reads unused slots.
    """
    capacity = 0
    while capacity < max(tokens, 1):
        capacity = -(-(capacity + max(headroom, capacity // 16)) // page) * page
    return capacity
