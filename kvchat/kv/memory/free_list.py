"""Allocates indices (of pages in a pool), the lowest free ones first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class FreeList:
    """The free indices: those given back, and all from ``end`` on."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._returned: list[int] = []

    def lowest(self, number: int) -> list[int]:
        """The ``number`` lowest free indices, ascending."""
        found = heapq.nsmallest(number, self._returned)
        return [*found, *range(self._end, self._end + number - len(found))]

    def after(self, number: int) -> int:
        """The length that a table needs to hold every index in use after ``number`` more are taken."""
        return self._end + max(0, number - len(self._returned))

    def take(self, indices: Iterable[int]) -> None:
        """Mark ``indices``, which ``lowest`` returned, as used."""
        for index in sorted(indices):
            if index in self._returned:
                self._returned.remove(index)
            else:
                assert index == self._end
                self._end += 1

    def give_back(self, indices: Iterable[int]) -> None:
        """Mark ``indices`` as free."""
        self._returned.extend(indices)
