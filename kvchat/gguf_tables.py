"""The tables that a GGUF file begins with, walked and not read: what reads them believes every length in them.

The ``gguf`` package reads a list entry by entry, past the end of the file for as long as the list is said to be.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_ENTRIES = 2**22  # of all tables and lists: three times those of the largest vocabulary, with its merges
MAX_DIMENSIONS = 8
LAYER = "blk."  # begins the names of what is in a layer, and is packed; a vocabulary's table and head are not
# Bytes of a value by its type; 8 is a text, 9 a list.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, LIST = 8, 9


class TensorEntry(NamedTuple):
    """A tensor: its name, its type, a number of ggml's enumeration, and its shape."""

    name: str
    kind: int
    shape: tuple[int, ...]


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
        self._order, self._entries = "<", 0

    def tensors(self) -> list[TensorEntry]:
        magic, version = self._read("4sI")
        if magic != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if version % 2**16 == 0:  # of a machine of the other byte order
            self._order = ">"
        tensors, values = self._read("QQ")
        self._count(tensors + values)
        for _ in range(values):
            self._skip_text()
            self._skip_value(*self._read("I"))
        return [self._tensor() for _ in range(tensors)]

    def _tensor(self) -> TensorEntry:
        name = self._file.read(self._length_of_text())
        (dimensions,) = self._read("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions:,} dimensions")
        *shape, kind, _offset = self._read(f"{dimensions}QIQ")
        return TensorEntry(name.decode(errors="replace"), kind, tuple(shape))

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
