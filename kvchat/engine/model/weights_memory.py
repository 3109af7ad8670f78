"""Places a model's weights in a CPU's memory: one behind the other, in huge pages.

A token reads all of them once. Small ones lie in small system pages wherever there was room; laid out they are read
faster (``kv.memory.huge_pages``), and what is merged later (``fusion``) is one matrix already.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from kvchat.engine.model.int8_rows import ALIGNED
from kvchat.kv.memory.huge_pages import aligned, use_huge_pages

# Bytes that are there twice while they are laid out. Weights of more fill huge pages where they are.
PIECE = 2**26
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # the numbers of glibc's settings
LARGE = 5 * 2**18  # bytes from which on a tensor has pages of its own while weights are packed: above those of a chunk
LARGEST_KEPT = 2**25  # glibc's own limit


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


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Meanwhile a large tensor that is freed is the system's again, and what is kept lies in no hole of a larger one.

    573 MiB of bfloat16 took up to 1.1 GiB while they became int8, of which little was in use: what was kept broke up
    the room of what was not. Afterwards glibc keeps what it keeps by itself once it has seen tensors of such sizes.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        _glibc("mallopt", M_MMAP_THRESHOLD, LARGEST_KEPT)
        _glibc("mallopt", M_TRIM_THRESHOLD, 2 * LARGEST_KEPT)


def give_back() -> None:
    """Give the system back what loading freed: glibc keeps it, 190 MiB beside int8 weights of 69."""
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such functions
        getattr(ctypes.CDLL(None), function)(*arguments)


def _room(weight: Tensor) -> int:
    """Bytes from the beginning of ``weight`` to that of the next one."""
    return -(-weight.nbytes // ALIGNED) * ALIGNED


def _pieces(model: Any) -> Iterator[list[nn.Parameter]]:
    """The small weights in runs of at most ``PIECE`` bytes; large ones are left where they are.

    Those of one module's children follow each other, matrices first, as they are merged: else merging would copy them
    and the run, which others need, would keep them too.
    """
    piece: list[nn.Parameter] = []
    for weights in _families(model):
        if piece and sum(map(_room, [*piece, *weights])) > PIECE:
            yield piece
            piece = []
        if sum(map(_room, weights)) <= PIECE:
            piece += weights
        else:
            yield from ([weight] for weight in weights)
    if piece:
        yield piece


def _families(model: Any) -> Iterator[list[nn.Parameter]]:
    """The small weights of each module's children; large ones get huge pages where they are."""
    named = ((name.split("."), weight) for name, weight in model.named_parameters())
    for _, family in itertools.groupby(named, key=lambda each: each[0][:-2]):
        small = []
        for _, weight in family:
            if type(weight) is not nn.Parameter or not weight.is_contiguous():
                continue
            if weight.nbytes > PIECE:
                use_huge_pages(weight.data)
            else:
                small.append(weight)
        yield sorted(small, key=Tensor.dim, reverse=True)
