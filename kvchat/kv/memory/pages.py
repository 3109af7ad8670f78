"""Copies of a host pool's pages in pageable host memory, in full precision or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StoredPages(Protocol):
    """A pool or a copy that holds a conversation's pages in host memory."""

    @property
    def quantized(self) -> Sequence[bool]:
        """For each page, whether it is an 8-bit page."""

    @property
    def dequantized(self) -> Set[int]:
        """Full-precision pages that were 8-bit until a truncation cut into them; their tokens have 8-bit values."""

    def stored(self, page: int) -> list[Tensor]:
        """Return a page of every layer: ``[H, 2, p, d]``, or ``[H, block_bytes]`` (uint8) if it is an 8-bit page."""


@dataclass(frozen=True)
class Pages:
    """Consecutive pages; ``quantized`` and ``dequantized`` are as in ``StoredPages``.

    Per layer, ``full_precision`` has the pages ``[n, H, 2, p, d]`` and ``eight_bit`` the pages ``[m, H, block_bytes]``.
    """

    quantized: Sequence[bool]
    full_precision: Sequence[Tensor]
    eight_bit: Sequence[Tensor]
    dequantized: Set[int] = frozenset()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.full_precision, *self.eight_bit))

    def stored(self, page: int) -> list[Tensor]:
        is_quantized = self.quantized[page]
        index = sum(each is is_quantized for each in self.quantized[:page])
        return [layer[index] for layer in (self.eight_bit if is_quantized else self.full_precision)]

    def beginning(self, pages: int) -> Pages:
        """Return the first ``pages``, not copied."""
        quantized = self.quantized[:pages]
        number = sum(quantized)
        return Pages(
            quantized,
            [layer[: len(quantized) - number] for layer in self.full_precision],
            [layer[:number] for layer in self.eight_bit],
            {page for page in self.dequantized if page < pages},
        )


def full_precision_pages(pages: StoredPages) -> int:
    """Return the number of pages before the first one with quantized tokens."""
    flags = enumerate(pages.quantized)
    affected = (page for page, is_quantized in flags if is_quantized or page in pages.dequantized)
    return next(affected, len(pages.quantized))


def has_quantized(pages: StoredPages) -> bool:
    return full_precision_pages(pages) < len(pages.quantized)


def copied(layers: Sequence[Tensor], index: Sequence[int]) -> list[Tensor]:
    """Return copies of the entries at ``index`` of each layer, in host memory."""
    where = torch.tensor(index, dtype=torch.int64)
    return [layer.index_select(0, where) for layer in layers]
