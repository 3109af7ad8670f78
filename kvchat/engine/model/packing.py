"""The ways to pack weights on a CPU, by transformers' names of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from kvchat.engine.model import int4_rows, int8_rows
from kvchat.engine.model.packed_rows import PackedRows, body


class Packing(NamedTuple):
    """The ``linears`` of a model are packed each by ``pack``, stacks of matrices that fit by ``stack``.

    Both take ``of_4_bits``: the weights had so many already. ``fits`` is asked with a matrix' rows and columns.
    """

    linears: Callable[[Any], Iterator[nn.Linear]]
    pack: Callable[..., None]
    fits: Callable[[int, int], bool]
    stack: Callable[..., PackedRows]


PACKINGS = {
    int8_rows.METHOD: Packing(body, int8_rows.pack, int8_rows.fits_stack, int8_rows.stack),
    int4_rows.METHOD: Packing(int4_rows.chosen, int4_rows.pack, int4_rows.fits, int4_rows.stack),
}
