"""Pages of a conversation that is not the present one, in plain host memory."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from kvchat.kv.memory.host_pool import HostPool


class ParkedPages:
    """A copy of a host pool's pages and of the last token's ``query``."""

    def __init__(self, pool: HostPool, query: bytes) -> None:
        self.query = query
        self._page = pool.geometry.page
        pool.synchronize()
        with torch.inference_mode():
            self._pages = pool.copied(0)

    @property
    def kinds(self) -> Sequence[bool]:
        """``StoredPages.kinds``"""
        return self._pages.kinds

    @property
    def cut_off(self) -> Set[int]:
        """``StoredPages.cut_off``"""
        return self._pages.cut_off

    def stored(self, page: int) -> list[Tensor]:
        """``StoredPages.stored``"""
        return self._pages.stored(page)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._pages.nbytes

    def read(self, pool: HostPool, tokens: int) -> int:
        """Put the pages of the first ``tokens`` into ``pool``; return ``tokens``."""
        pool.put(0, self._pages.beginning(-(-tokens // self._page)))
        return tokens


def parked_bytes(pool: HostPool) -> int:
    """Bytes that parking what a host pool holds takes."""
    return sum(map(pool.page_bytes, pool.kinds))
