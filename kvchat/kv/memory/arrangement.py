"""The order of a layer's K/V in its region of host memory: by page for a GPU, which fetches pages, by head for a CPU.

Both are one array, cut into rows (a token's K or V of one head) and blocks (a page's K or V of one head), and seen as
``[page, H, 2, p, d]``. Only what is next to what differs. 8-bit pages lie by page in either case.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import rounding
from kvchat.kv.memory.huge_pages import HUGE_PAGE
from kvchat.kv.memory.pinned import in_system_pages


class ByPage:
    """``[page, H, 2, p, d]``: one (page, head) is one contiguous block of K then V, and memory grows at the end."""

    parts = 1

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.page_bytes = geometry.kv_heads * 2 * geometry.page * geometry.row_bytes

    def nbytes(self, tokens: int) -> int:
        """Bytes of memory for ``tokens``, in whole system pages."""
        return in_system_pages(self.geometry.pages(tokens) * self.page_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        """Bytes of address space for ``tokens``."""
        return self.nbytes(tokens)

    def tokens(self, nbytes: int) -> int:
        """Whole pages of tokens that fit ``nbytes``, of memory or of address space."""
        return nbytes // self.page_bytes * self.geometry.page

    def table(self, region: Tensor) -> Tensor:
        """A region (uint8) as ``[page, H, 2, p, d]``."""
        g = self.geometry
        pages = len(region) // self.page_bytes
        return region[: pages * self.page_bytes].view(g.dtype).view(pages, g.kv_heads, 2, g.page, g.d)

    def rows(self, table: Tensor) -> Tensor:
        """All rows of a table, ``[n, d]``."""
        return table.view(-1, self.geometry.d)

    def row_index(self, positions: Tensor, heads: Tensor, reserved: int) -> Tensor:
        """Rows of K of tokens ``positions`` and ``heads`` (broadcast), where there is room for ``reserved`` tokens."""
        g = self.geometry
        page = torch.div(positions, g.page, rounding_mode="floor")
        return (page * g.kv_heads + heads) * (2 * g.page) + positions % g.page

    def value_rows(self, reserved: int) -> int:
        """Number of rows from a token's K to its V."""
        return self.geometry.page

    def block_strides(self, reserved: int) -> tuple[int, int, int]:
        """Number of blocks from one page to the next, from one head to the next and from K to V."""
        return 2 * self.geometry.kv_heads, 2, 1


class ByHead(ByPage):
    """``[2, H, token, d]``: a head's keys are one matrix, as are its values, so that attention reads them in place.

    Each of the ``2 * H`` parts grows by itself; address space costs nothing until it is written to.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.parts = 2 * geometry.kv_heads

    def nbytes(self, tokens: int) -> int:
        g = self.geometry
        return self.parts * in_system_pages(g.round_up(tokens) * g.row_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        # A part is whole system pages, for memory, and whole pages of tokens, for rows; a large one begins a huge page.
        size = self.geometry.round_up(tokens) * self.geometry.row_bytes
        unit = math.lcm(HUGE_PAGE if size > HUGE_PAGE else mmap.PAGESIZE, self.geometry.page * self.geometry.row_bytes)
        return self.parts * -(-size // unit) * unit

    def table(self, region: Tensor) -> Tensor:
        g = self.geometry
        by_head = region.view(g.dtype).view(2, g.kv_heads, -1, g.page, g.d)
        return by_head.permute(2, 1, 0, 3, 4)

    def rows(self, table: Tensor) -> Tensor:
        return table.permute(2, 1, 0, 3, 4).reshape(-1, self.geometry.d)

    def row_index(self, positions: Tensor, heads: Tensor, reserved: int) -> Tensor:
        return heads * reserved + positions

    def value_rows(self, reserved: int) -> int:
        return self.geometry.kv_heads * reserved

    def block_strides(self, reserved: int) -> tuple[int, int, int]:
        pages = reserved // self.geometry.page
        return 1, pages, self.geometry.kv_heads * pages


class RoundedByPage(ByPage):
    """8-bit pages, ``[page, H, block_bytes]`` (uint8); they have no rows."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.page_bytes = rounding.page_bytes(geometry)

    def table(self, region: Tensor) -> Tensor:
        pages, heads = len(region) // self.page_bytes, self.geometry.kv_heads
        return region[: pages * self.page_bytes].view(pages, heads, -1)

    def rows(self, table: Tensor) -> Tensor:
        return table


def arrangement_of(geometry: Geometry) -> ByPage:
    """The arrangement that a host pool of this geometry uses."""
    return ByHead(geometry) if geometry.unified else ByPage(geometry)


def layer_bytes(geometry: Geometry, tokens: int, rounded: int = 0) -> int:
    """Bytes of host memory that one layer of the pool takes with room for ``tokens`` and ``rounded`` in 8-bit pages."""
    return arrangement_of(geometry).nbytes(tokens) + RoundedByPage(geometry).nbytes(rounded)
