"""Pages of a conversation that is not the present one, in plain host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvchat.kv.memory.host_pool import HostPool


class ParkedPages:
    """A copy of a host pool's pages, ``layers [page, H, 2, p, d]``, and of the last token's ``query``."""

    def __init__(self, pool: HostPool, query: bytes) -> None:
        self.query = query
        pages = pool.geometry.pages(pool.total)
        self._page = pool.geometry.page
        pool.settle()
        with torch.inference_mode():
            self.layers = [layer[:pages].clone(memory_format=torch.contiguous_format) for layer in pool.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(layer.nbytes for layer in self.layers)

    def read(self, layers: Sequence[Tensor], tokens: int) -> int:
        """Copy the pages of the first ``tokens`` into ``layers``; return ``tokens``."""
        pages = -(-tokens // self._page)
        for layer, kept in zip(layers, self.layers, strict=True):
            layer[:pages] = kept[:pages]
        return tokens


def parked_bytes(pool: HostPool) -> int:
    """Bytes that parking what a host pool holds takes."""
    return pool.geometry.round_up(pool.total) * pool.geometry.token_bytes
