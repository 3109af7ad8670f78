"""The tables that a GGUF file begins with, walked and not read: what reads them believes every length in them.

The ``gguf`` package reads a list entry by entry, past the end of the file for as long as the list is said to be.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_ENTRIES = 2**22  # of all tables and lists: three times those of the largest vocabulary, with its merges
MAX_DIMENSIONS = 8
LAYER = "blk."  # begins the names of what is in a layer, and is packed; a vocabulary's table and head are not
# ggml's types by their numbers, and the bits of an element with its constants.
TYPES: dict[int, tuple[str, float]] = {
    0: ("F32", 32), 1: ("F16", 16), 2: ("Q4_0", 4.5), 3: ("Q4_1", 5), 6: ("Q5_0", 5.5), 7: ("Q5_1", 6),
    8: ("Q8_0", 8.5), 9: ("Q8_1", 10), 10: ("Q2_K", 2.625), 11: ("Q3_K", 3.4375), 12: ("Q4_K", 4.5), 13: ("Q5_K", 5.5),
    14: ("Q6_K", 6.5625), 15: ("Q8_K", 9.125), 16: ("IQ2_XXS", 2.0625), 17: ("IQ2_XS", 2.3125), 18: ("IQ3_XXS", 3.0625),
    19: ("IQ1_S", 1.5625), 20: ("IQ4_NL", 4.5), 21: ("IQ3_S", 3.4375), 22: ("IQ2_S", 2.5625), 23: ("IQ4_XS", 4.25),
    24: ("I8", 8), 25: ("I16", 16), 26: ("I32", 32), 27: ("I64", 64), 28: ("F64", 64), 29: ("IQ1_M", 1.75),
    30: ("BF16", 16), 34: ("TQ1_0", 1.6875), 35: ("TQ2_0", 2.0625), 39: ("MXFP4", 4.25), 40: ("NVFP4", 4.5),
    41: ("Q1_0", 1.125),
}  # fmt: skip
UNKNOWN_BITS = 32
# Bytes of a value by its type; 8 is a text, 9 a list.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, TEXT, LIST = 4, 8, 9
ALIGNMENT, ALIGNED = b"general.alignment", 32  # of the first tensor, and what it is where a file does not say


class TensorEntry(NamedTuple):
    """A tensor: its name, its type, a number of ggml's enumeration, and its shape.

    ``end`` is how many bytes a file has to the tensor's end; to its beginning if the type is unknown.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    end: int


def type_of(kind: int) -> tuple[str, float]:
    """The name of a tensor's type, and the bits that an element takes; of an unknown one as many as of a float."""
    return TYPES.get(kind, (f"type {kind}", UNKNOWN_BITS))


def layer_bits(entries: Sequence[TensorEntry]) -> float:
    """Bits that an element of the layers' matrices takes in the mean; 0 where there are none."""
    matrices = [one for one in entries if len(one.shape) > 1 and one.name.startswith(LAYER)]
    elements = [math.prod(one.shape) for one in matrices]
    stored = sum(number * type_of(one.kind)[1] for number, one in zip(elements, matrices, strict=True))
    return stored / max(1, sum(elements))


def tensors(path: Path) -> list[TensorEntry]:
    """The tensors that a GGUF file has.

    Raises:
        ValueError: it is none, a length in it leads past its end, or it has more than ``MAX_ENTRIES``.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            return _Walk(file, path.stat().st_size).tensors()
        except struct.error as error:
            raise ValueError("it ends in the middle of a table") from error


class _Walk:
    """A walk through the ``size`` bytes of a ``file``."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._order, self._entries, self._aligned = "<", 0, ALIGNED

    def tensors(self) -> list[TensorEntry]:
        magic, version = self._read("4sI")
        if magic != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if version % 2**16 == 0:  # of a machine of the other byte order
            self._order = ">"
        tensors, values = self._read("QQ")
        self._count(tensors + values)
        for _ in range(values):
            self._value(self._text(), *self._read("I"))
        found = [self._tensor() for _ in range(tensors)]
        begin = math.ceil(self._file.tell() / self._aligned) * self._aligned
        return [one._replace(end=begin + one.end) for one in found]

    def _tensor(self) -> TensorEntry:
        """A tensor, whose ``end`` counts from where the first one begins."""
        name = self._text()
        (dimensions,) = self._read("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions:,} dimensions")
        *shape, kind, offset = self._read(f"{dimensions}QIQ")
        nbytes = int(math.prod(shape) * type_of(kind)[1] / 8) if kind in TYPES else 0
        return TensorEntry(name.decode(errors="replace"), kind, tuple(shape), offset + nbytes)

    def _value(self, key: bytes, kind: int) -> None:
        if key == ALIGNMENT and kind == UINT32:
            self._aligned = max(1, *self._read("I"))
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int) -> None:
        length = 1
        if kind == LIST:
            kind, length = self._read("IQ")
            self._count(length)
        if kind == TEXT:
            for _ in range(length):
                self._skip_text()
        elif kind in VALUE_BYTES:
            self._skip(length * VALUE_BYTES[kind])
        else:  # also a list of lists, which the format allows and nobody writes
            raise ValueError(f"a value has the type {kind:,}")

    def _text(self) -> bytes:
        return self._file.read(self._length_of_text())

    def _skip_text(self) -> None:
        self._file.seek(self._length_of_text(), 1)

    def _length_of_text(self) -> int:
        (nbytes,) = self._read("Q")
        return self._within(nbytes)

    def _read(self, form: str) -> tuple[Any, ...]:
        form = self._order + form
        return struct.unpack(form, self._file.read(struct.calcsize(form)))

    def _skip(self, nbytes: int) -> None:
        self._file.seek(self._within(nbytes), 1)

    def _within(self, nbytes: int) -> int:
        if nbytes > self._size - self._file.tell():
            raise ValueError(f"a length of {nbytes:,} leads past its end")
        return nbytes

    def _count(self, entries: int) -> None:
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            raise ValueError(f"a table of {entries:,} entries is too long")
