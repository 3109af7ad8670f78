"""Places a model's weights in a CPU's memory: one behind the other, in huge pages.

A token reads all of them once. Small ones lie in small system pages wherever there was room; laid out they are read
faster (``kv.memory.huge_pages``), and what is merged later (``fusion``) is one matrix already.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from kvchat.engine.model.int8_rows import ALIGNED
from kvchat.kv.memory.huge_pages import aligned, use_huge_pages

# Bytes that are there twice while they are laid out. Weights of more fill huge pages where they are.
PIECE = 2**26


def lay_out(model: Any) -> None:
    """Move the weights of ``model``, on a CPU, together in the order of its modules, aligned as torch aligns its own.

    Those that are tensors of a quantizer stay.
    """
    for weights in _pieces(model):
        memory, at = aligned(sum(map(_room, weights))), 0
        use_huge_pages(memory)
        for weight in weights:
            place = memory[at : at + weight.nbytes].view(weight.dtype).view(weight.shape)
            weight.data = place.copy_(weight.data)
            at += _room(weight)


def give_back() -> None:
    """Give the system back what loading freed: glibc keeps it, 190 MiB beside int8 weights of 69."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def _room(weight: Tensor) -> int:
    """Bytes from the beginning of ``weight`` to that of the next one."""
    return -(-weight.nbytes // ALIGNED) * ALIGNED


def _pieces(model: Any) -> Iterator[list[nn.Parameter]]:
    """The small weights in runs of at most ``PIECE`` bytes; large ones are left where they are."""
    piece: list[nn.Parameter] = []
    for weight in model.parameters():
        if type(weight) is not nn.Parameter or not weight.is_contiguous():
            continue
        if weight.nbytes > PIECE:
            use_huge_pages(weight.data)
            continue
        if sum(map(_room, piece)) + _room(weight) > PIECE:
            yield piece
            piece = []
        piece.append(weight)
    if piece:
        yield piece
