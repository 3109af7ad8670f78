"""Copies of a host pool's pages in plain host memory, full-precision and 8-bit ones."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StoredPages(Protocol):
    """A holder of a conversation's pages in host memory: a pool or a copy."""

    @property
    def quantized(self) -> Sequence[bool]:
        """Of each page, whether it is an 8-bit one."""

    @property
    def dequantized(self) -> Set[int]:
        """The full-precision pages that were 8-bit ones, until truncated inside: they hold quantized tokens."""

    def stored(self, page: int) -> list[Tensor]:
        """A page of every layer: ``[H, 2, p, d]``, or ``[H, block_bytes]`` (uint8) of an 8-bit one."""


@dataclass(frozen=True)
class Pages:
    """Consecutive pages; ``quantized`` and ``dequantized`` are as in ``StoredPages``.

    Of each layer the ``full_precision`` ones ``[n, H, 2, p, d]`` and the ``eight_bit`` ones ``[m, H, block_bytes]``.
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
        """The first ``pages`` of them, not copied."""
        quantized = self.quantized[:pages]
        number = sum(quantized)
        return Pages(
            quantized,
            [layer[: len(quantized) - number] for layer in self.full_precision],
            [layer[:number] for layer in self.eight_bit],
            {page for page in self.dequantized if page < pages},
        )


def full_precision_pages(pages: StoredPages) -> int:
    """The number of pages before the first with quantized tokens."""
    flags = enumerate(pages.quantized)
    affected = (page for page, is_quantized in flags if is_quantized or page in pages.dequantized)
    return next(affected, len(pages.quantized))


def has_quantized(pages: StoredPages) -> bool:
    return full_precision_pages(pages) < len(pages.quantized)


def copied(layers: Sequence[Tensor], index: Sequence[int]) -> list[Tensor]:
    """The entries at ``index`` of each layer, in host memory of their own."""
    where = torch.tensor(index, dtype=torch.int64)
    return [layer.index_select(0, where) for layer in layers]
