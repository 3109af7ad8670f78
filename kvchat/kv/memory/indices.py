"""Indices that are given out, the lowest first, and come back."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Indices:
    """Which indices are free; the lowest are taken first. All from ``end`` on are."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._returned: list[int] = []

    def lowest(self, number: int) -> list[int]:
        """So many free ones, ascending."""
        found = heapq.nsmallest(number, self._returned)
        return [*found, *range(self._end, self._end + number - len(found))]

    def after(self, number: int) -> int:
        """How many indices there are up to the last in use once the ``number`` lowest are taken."""
        return self._end + max(0, number - len(self._returned))

    def take(self, indices: Iterable[int]) -> None:
        """Use these, which are the lowest."""
        for index in sorted(indices):
            if index in self._returned:
                self._returned.remove(index)
            else:
                assert index == self._end
                self._end += 1

    def give_back(self, indices: Iterable[int]) -> None:
        """Use these no longer."""
        self._returned.extend(indices)
