"""Copies of a host pool's pages in plain host memory, exact and 8-bit ones."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StoredPages(Protocol):
    """A holder of a conversation's pages in host memory: a pool or a copy."""

    @property
    def kinds(self) -> Sequence[bool]:
        """Of each page, whether it is an 8-bit one."""

    @property
    def cut_off(self) -> Set[int]:
        """The pages that were 8-bit ones before they were cut off inside: their tokens are rounded."""

    def stored(self, page: int) -> list[Tensor]:
        """A page of every layer: ``[H, 2, p, d]``, or ``[H, block_bytes]`` (uint8) of an 8-bit one."""


@dataclass(frozen=True)
class Pages:
    """Consecutive pages; ``kinds`` and ``cut_off`` say which are 8-bit ones, or were, as in ``StoredPages``.

    Of each layer the ``exact`` ones ``[n, H, 2, p, d]`` and the 8-bit ones ``[m, H, block_bytes]``.
    """

    kinds: Sequence[bool]
    exact: Sequence[Tensor]
    rounded: Sequence[Tensor]
    cut_off: Set[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(layer.nbytes for layer in (*self.exact, *self.rounded))

    def stored(self, page: int) -> list[Tensor]:
        """``StoredPages.stored``"""
        kind = self.kinds[page]
        index = sum(each is kind for each in self.kinds[:page])
        return [layer[index] for layer in (self.rounded if kind else self.exact)]

    def beginning(self, pages: int) -> Pages:
        """The first ``pages`` of them, not copied."""
        kinds = self.kinds[:pages]
        rounded = sum(kinds)
        return Pages(
            kinds,
            [layer[: len(kinds) - rounded] for layer in self.exact],
            [layer[:rounded] for layer in self.rounded],
            {page for page in self.cut_off if page < pages},
        )


def exact_pages(pages: StoredPages) -> int:
    """The pages before the first of rounded tokens: an 8-bit one, or one that was before it was cut off."""
    return next((page for page, kind in enumerate(pages.kinds) if kind or page in pages.cut_off), len(pages.kinds))


def has_rounded(pages: StoredPages) -> bool:
    """True if some tokens are rounded."""
    return exact_pages(pages) < len(pages.kinds)


def side_by_side(places: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """``places``, of 8-bit pages ``~index``, as runs of at most ``longest``: the first one's place, and length."""
    found: list[tuple[int, int]] = []
    for place in places:
        first, length = found[-1] if found else (0, 0)
        follows = place == (first + length if place >= 0 else first - length) and (place < 0) == (first < 0)
        if 0 < length < longest and follows:
            found[-1] = first, length + 1
        else:
            found.append((place, 1))
    return found


def copied(layers: Sequence[Tensor], index: Sequence[int]) -> list[Tensor]:
    """The entries at ``index`` of each layer, in host memory of their own."""
    where = torch.tensor(index, dtype=torch.int64)
    return [layer.index_select(0, where) for layer in layers]
