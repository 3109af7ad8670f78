"""Pages of one conversation in a file: written page by page, read back into a host pool.

=========  ========================================================================================================
header     ``KVCHATKV``, length of the JSON as u32, the JSON (whose K/V these are), zeros up to ``HEADER_BYTES``
record     one for each page, all of one size: link (16 bytes), tokens in it u32, CRC-32 of the blocks u32, ``page``
           rows of ``TOKEN``, and the page's block ``[H, 2, p, d]`` of every layer
end        link (16 bytes) of the last record and the queries of the last token, which some modes choose pages by
=========  ========================================================================================================

Numbers are little-endian. A record's link is the BLAKE2b of the link before it (the first: of the header), its two
numbers and its rows, so it names a whole history. Who writes or reads a page says by its link which history he means,
and pages of two do not go together, also if two applications write at once. Blocks are checked by their CRC when they
are read. So a file is good up to its first record that is torn, damaged or of another
history, at whatever moment its writer ended; only the last page of a conversation that goes on is written again.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvchat import files
from kvchat.kv.geometry import Geometry

MAGIC = b"KVCHATKV"
HEADER_BYTES = 4096
LINK_BYTES = 16
NUMBERS = struct.Struct("<II")

# What is kept of a token beside its K/V: its id, flags, and after it the text's length and digest where they are known.
TOKEN = np.dtype([("id", "<i4"), ("flags", "u1"), ("chars", "<i8"), ("digest", "V16")])
Rows = NDArray[np.void]


class DamagedFileError(Exception):
    """The file holds nothing that can be used; the message says why, without the file's name."""


class PageFile:
    """The file at ``path`` with pages of this geometry; ``identity`` says of which model, template and so on.

    ``links`` are those of the pages known to be there, as ``rows`` found or ``write`` left them.
    """

    def __init__(self, path: Path, geometry: Geometry, identity: dict[str, Any]) -> None:
        self.path = path
        self.links: list[bytes] = []
        self._page = geometry.page
        self._block_bytes = geometry.kv_heads * 2 * geometry.page * geometry.row_bytes
        self._query_bytes = geometry.layers * geometry.q_heads * geometry.d_k * geometry.dtype.itemsize
        self._head_bytes = LINK_BYTES + NUMBERS.size + self._page * TOKEN.itemsize
        self.record_bytes = self._head_bytes + geometry.layers * self._block_bytes
        self._identity = {
            "version": 1,
            **identity,
            "layers": geometry.layers,
            "K/V heads": geometry.kv_heads,
            "head sizes": [geometry.d_k, geometry.d_v],
            "page": geometry.page,
            "number format of K/V": str(geometry.dtype).removeprefix("torch."),
        }
        body = json.dumps(self._identity).encode()
        self._header = (MAGIC + struct.pack("<I", len(body)) + body).ljust(HEADER_BYTES, b"\0")

    # ---- reading

    def rows(self, pages: int | None = None) -> Rows:
        """What is kept of the tokens in the first ``pages`` (None: all) that are linked; blocks are not looked at.

        Raises:
            DamagedFileError: the file is no such file, or of another model; OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            link = self._checked_header(file.read(HEADER_BYTES))
            size = os.fstat(file.fileno()).st_size
            found, self.links = [], []
            for record in range((size - HEADER_BYTES) // self.record_bytes)[:pages]:
                file.seek(self._at(record))
                head = file.read(self._head_bytes)
                if head[:LINK_BYTES] != _link(link, head[LINK_BYTES:]):
                    break
                link = head[:LINK_BYTES]
                self.links.append(link)
                tokens, _ = NUMBERS.unpack_from(head, LINK_BYTES)
                found.append(np.frombuffer(head, TOKEN, offset=LINK_BYTES + NUMBERS.size)[:tokens])
                if tokens < self._page:
                    break
        return np.concatenate(found) if found else np.empty(0, TOKEN)

    def read(self, layers: Sequence[Tensor], tokens: int) -> int:
        """Read the pages of the first ``tokens`` into ``layers [page, H, 2, p, d]``, which lie in host memory.

        Returns how many of them are there, fewer where a page is damaged or no longer the one that ``rows`` found.

        Raises:
            OSError: the file cannot be read.
        """
        record_blocks = torch.empty((len(layers), *layers[0].shape[1:]), dtype=layers[0].dtype)
        into = record_blocks.view(torch.uint8).numpy().data.cast("B")
        with self.path.open("rb", buffering=0) as file:
            for record in range(-(-tokens // self._page)):
                file.seek(self._at(record))
                head = file.read(LINK_BYTES + NUMBERS.size)
                if head[:LINK_BYTES] != self.links[record]:
                    return record * self._page
                file.seek(self._at(record) + self._head_bytes)
                whole = file.readinto(into) == len(into)
                if not whole or zlib.crc32(into) != NUMBERS.unpack_from(head, LINK_BYTES)[1]:
                    return record * self._page
                for layer, block in zip(layers, record_blocks, strict=True):
                    layer[record] = block
        return tokens

    def query(self, tokens: int) -> bytes:
        """The queries of the last of ``tokens``, all that ``rows`` found; empty where they are not there.

        Raises:
            OSError: the file cannot be read.
        """
        record = -(-tokens // self._page)
        with self.path.open("rb") as file:
            file.seek(self._at(record))
            end = file.read(LINK_BYTES + self._query_bytes)
        return end[LINK_BYTES:] if end[:LINK_BYTES] == _link(self.links[record - 1], end[LINK_BYTES:]) else b""

    # ---- writing

    def write(self, page: int, rows: Rows, blocks: bytes, query: bytes = b"") -> None:
        """Write a page after those of ``links`` before it and cut off what follows; ``rows`` are its tokens'.

        With the last page comes the last token's ``query``.

        Raises:
            DamagedFileError: the pages before it are not there; OSError: the disk is full, for example.
        """
        with self._opened(page) as file:
            if page == 0:
                file.truncate(0)
                _write(file, self._header)
            before = self._link_before(file, page)
            file.truncate(self._at(page))
            padded = np.zeros(self._page, TOKEN)
            padded[: len(rows)] = rows
            body = NUMBERS.pack(len(rows), zlib.crc32(blocks)) + padded.tobytes()
            file.seek(self._at(page))
            try:
                link = _link(before, body)
                end = _link(link, query) + query if query else b""
                _write(file, link + body + blocks + end)
            except OSError:
                file.truncate(self._at(page))
                raise
        self.links[page:] = [link]

    def _opened(self, page: int) -> FileIO:
        files.make_folder(self.path.parent)
        new = os.O_CREAT if page == 0 else 0
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | new, 0o600)
        except FileNotFoundError:
            raise DamagedFileError("it is gone") from None
        return open(descriptor, "r+b", buffering=0)

    def _link_before(self, file: FileIO, page: int) -> bytes:
        file.seek(0)
        link = self._checked_header(file.read(HEADER_BYTES))
        if page > 0:
            file.seek(self._at(page - 1))
            link = file.read(LINK_BYTES)
            if self.links[page - 1 : page] != [link] or os.fstat(file.fileno()).st_size < self._at(page):
                raise DamagedFileError("pages are missing or of another history")
        return link

    def _checked_header(self, header: bytes) -> bytes:
        """The link to the first record.

        Raises:
            DamagedFileError: it is another header than this file is to have.
        """
        if header != self._header:
            raise DamagedFileError(self._difference(header))
        return blake2b(header, digest_size=LINK_BYTES).digest()

    def _difference(self, header: bytes) -> str:
        try:
            if header[: len(MAGIC)] != MAGIC:
                raise ValueError
            length = struct.unpack_from("<I", header, len(MAGIC))[0]
            found = json.loads(header[len(MAGIC) + 4 :][:length])
            return next(f"another {name}" for name, value in self._identity.items() if found.get(name) != value)
        except (ValueError, RecursionError, struct.error, AttributeError, StopIteration):
            return "the file is damaged"

    def _at(self, record: int) -> int:
        return HEADER_BYTES + record * self.record_bytes


def blocks_of(layers: Sequence[Tensor], page: int) -> bytes:
    """The bytes of a page in ``layers [page, H, 2, p, d]``, one layer after the other."""
    return b"".join(layer[page].contiguous().view(torch.uint8).numpy().tobytes() for layer in layers)


def _link(before: bytes, body: bytes) -> bytes:
    return blake2b(before + body, digest_size=LINK_BYTES).digest()


def _write(file: Any, data: bytes) -> None:
    """Write all of it: what is short of it fails at the next try, with the reason."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
