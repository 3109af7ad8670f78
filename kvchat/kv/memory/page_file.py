"""A file with the pages of one conversation: written page by page, and read back into a host pool.

=========  ========================================================================================================
header     ``KVCHATKV``, length of the JSON as u32, JSON that identifies the model, zeros up to ``HEADER_BYTES``
record     one for each page: link (16 bytes), number of tokens u16, kind u16 (0: full precision, 1: 8 bits, 2: was in
           8 bits until a truncation cut into it), CRC-32 of the blocks u32, ``page`` rows of ``TOKEN``, and a block for
           every layer: ``[H, 2, p, d]`` in the model's number format, or ``[H, block_bytes]`` of ``eight_bit_pages``
end        link (16 bytes), the queries of the last token, by which some modes choose pages, ``STATES`` entries for a
           hybrid model's recurrent states (number of tokens u64, bytes u64 (0: no state), CRC-32 u32), then the states
=========  ========================================================================================================

Numbers are little-endian. A record's link is the BLAKE2b hash of the previous link (of the header for the first
record), the record's numbers and its rows, so a link identifies the whole history up to its page. The end's link covers
everything before the states. Readers and writers compare links, so pages of different histories are never mixed, even
if two applications write at once. Blocks and states are checked by their CRC on reading. So a file is valid up to the
first incomplete, damaged or foreign record. As a conversation grows, only its last page is rewritten.
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
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvchat import files
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory import eight_bit_pages
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.pages import Pages

MAGIC = b"KVCHATKV"
HEADER_BYTES = 4096
LINK_BYTES = 16
FULL_PRECISION, QUANTIZED, DEQUANTIZED = range(3)  # the kinds of a page
NUMBERS = struct.Struct("<HHI")
STATES = 2  # maximum number of recurrent states
STATE = struct.Struct("<QQI")

# What is stored of a token besides its K/V: id, flags, and the length and digest of the text up to it, if known.
TOKEN = np.dtype([("id", "<i4"), ("flags", "u1"), ("chars", "<i8"), ("digest", "V16")])
Rows = NDArray[np.void]


class Link(NamedTuple):
    """A record in the file: its link, where it ends, and the kind of its page."""

    digest: bytes
    end: int
    kind: int


class SavedState(NamedTuple):
    """The recurrent state after ``tokens`` tokens: ``nbytes`` bytes at offset ``at`` of the file."""

    tokens: int
    at: int
    nbytes: int
    crc: int


class End(NamedTuple):
    """The part of the file after the pages: the last token's ``query`` (empty if unknown) and recurrent ``states``."""

    query: bytes = b""
    states: Sequence[SavedState] = ()


class DamagedFileError(Exception):
    """The file is unusable; the message says why, without the file's name."""


class OtherModelError(DamagedFileError):
    """The K/V in the file belong to another model."""


class PageFile:
    """The file at ``path`` with pages of this geometry; ``identity`` names the model, its template and so on.

    ``links`` has the links of the pages in the file, as ``rows`` found them or ``write`` left them.
    """

    def __init__(self, path: Path, geometry: Geometry, identity: dict[str, Any]) -> None:
        self.path = path
        self.links: list[Link] = []
        self._page = geometry.page
        full_precision = geometry.kv_heads * 2 * geometry.page * geometry.row_bytes
        self._page_bytes = [geometry.layers * size for size in (full_precision, eight_bit_pages.page_bytes(geometry))]
        self._shapes = (
            ((geometry.kv_heads, 2, geometry.page, geometry.d), geometry.dtype),
            ((geometry.kv_heads, eight_bit_pages.block_bytes(geometry)), torch.uint8),
        )
        self._layers = geometry.layers
        self._query_bytes = geometry.layers * geometry.q_heads * geometry.d_k * geometry.dtype.itemsize
        self._end_bytes = LINK_BYTES + self._query_bytes + STATES * STATE.size
        self._head_bytes = LINK_BYTES + NUMBERS.size + self._page * TOKEN.itemsize
        self._identity = {
            "version": 2,
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
        """Return the rows of the tokens in the first ``pages`` (None: all) with correct links, without reading K/V.

        Raises:
            DamagedFileError: the file is damaged or of another model; OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            link = self._checked_header(file.read(HEADER_BYTES))
            size = os.fstat(file.fileno()).st_size
            found: list[Rows] = []
            self.links = []
            while pages is None or len(found) < pages:
                start = self._at(len(found))
                file.seek(start)
                head = file.read(self._head_bytes)
                if len(head) < self._head_bytes or head[:LINK_BYTES] != _link(link, head[LINK_BYTES:]):
                    break
                tokens, kind, _ = NUMBERS.unpack_from(head, LINK_BYTES)
                link, end = head[:LINK_BYTES], start + self.record_bytes(kind == QUANTIZED)
                if end > size:
                    break
                self.links.append(Link(link, end, kind))
                found.append(np.frombuffer(head, TOKEN, offset=LINK_BYTES + NUMBERS.size)[:tokens])
                if tokens < self._page:
                    break
        if not found and size > HEADER_BYTES:
            raise DamagedFileError("its first page is damaged")
        return np.concatenate(found) if found else np.empty(0, TOKEN)

    @property
    def full_precision_pages(self) -> int:
        """Number of pages in ``links`` before the first that is or was 8-bit."""
        return next((page for page, link in enumerate(self.links) if link.kind != FULL_PRECISION), len(self.links))

    def read(self, pool: HostPool, tokens: int) -> int:
        """Read the pages of the first ``tokens`` into ``pool``; return how many tokens were read.

        They are fewer if a page is damaged or is no longer the one that ``rows`` found.

        Raises:
            OSError: the file cannot be read; DoesNotFitError: there is not enough memory.
        """
        buffers = [torch.empty((self._layers, 1, *shape), dtype=dtype) for shape, dtype in self._shapes]
        with self.path.open("rb", buffering=0) as file:
            for record in range(-(-tokens // self._page)):
                file.seek(self._at(record))
                head = file.read(LINK_BYTES + NUMBERS.size)
                digest, _, kind = self.links[record]
                quantized = kind == QUANTIZED
                if head[:LINK_BYTES] != digest:
                    return record * self._page
                into = buffers[quantized].view(torch.uint8).numpy().data.cast("B")
                file.seek(self._at(record) + self._head_bytes)
                whole = file.readinto(into) == len(into)
                if not whole or zlib.crc32(into) != NUMBERS.unpack_from(head, LINK_BYTES)[2]:
                    return record * self._page
                blocks, dequantized = list(buffers[quantized]), {0} if kind == DEQUANTIZED else set()
                eight_bit, full_precision = (blocks, []) if quantized else ([], blocks)
                pool.put(record, Pages([quantized], full_precision, eight_bit, dequantized))
        return tokens

    def end(self) -> End:
        """Return the part after the pages that ``rows`` found; empty if pages are missing or were written since.

        Raises:
            OSError: the file cannot be read.
        """
        if not self.links:
            return End()
        digest, at, _ = self.links[-1]
        with self.path.open("rb") as file:
            file.seek(at)
            end = file.read(self._end_bytes)
        link, body = end[:LINK_BYTES], end[LINK_BYTES:]
        if len(end) < self._end_bytes or link != _link(digest, body):
            return End()
        states, at = [], at + self._end_bytes
        for tokens, nbytes, crc in STATE.iter_unpack(body[self._query_bytes :]):
            states.append(SavedState(tokens, at, nbytes, crc))
            at += nbytes
        return End(body[: self._query_bytes], [state for state in states if state.nbytes])

    def state(self, saved: SavedState) -> bytes:
        """Return the bytes of a recurrent state; empty if they are damaged.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(saved.at)
            data = file.read(saved.nbytes)
        return data if zlib.crc32(data) == saved.crc else b""

    # ---- writing

    def write(
        self,
        page: int,
        rows: Rows,
        blocks: bytes,
        dequantized: bool = False,
        query: bytes = b"",
        states: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Write page number ``page`` with its tokens' ``rows``, and truncate the file after it.

        The length of ``blocks`` tells whether it is an 8-bit page; ``dequantized``: it was one. With the last page,
        pass the last token's ``query`` and the recurrent ``states``, each with its number of tokens.

        Raises:
            DamagedFileError: earlier pages are missing; OSError: for example, the disk is full.
        """
        with self._opened(page) as file:
            if page == 0:
                file.truncate(0)
                _write(file, self._header)
            before = self._link_before(file, page)
            file.truncate(self._at(page))
            padded = np.zeros(self._page, TOKEN)
            padded[: len(rows)] = rows
            quantized = len(blocks) == self._page_bytes[True]
            kind = QUANTIZED if quantized else DEQUANTIZED if dequantized else FULL_PRECISION
            body = NUMBERS.pack(len(rows), kind, zlib.crc32(blocks)) + padded.tobytes()
            file.seek(self._at(page))
            try:
                link = _link(before, body)
                _write(file, link + body + blocks)
                if query:
                    table = [STATE.pack(tokens, len(state), zlib.crc32(state)) for tokens, state in states]
                    body = query + b"".join(table).ljust(STATES * STATE.size, b"\0")
                    _write(file, _link(link, body) + body)
                    for _, state in states:
                        _write(file, state)
            except OSError:
                file.truncate(self._at(page))
                raise
        self.links[page:] = [Link(link, self._at(page) + self.record_bytes(quantized), kind)]

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
            known = self.links[page - 1 : page]
            if known:
                file.seek(self._at(page - 1))
                link = file.read(LINK_BYTES)
            if not known or link != known[0].digest or os.fstat(file.fileno()).st_size < known[0].end:
                raise DamagedFileError("pages are missing or of another history")
        return link

    def _checked_header(self, header: bytes) -> bytes:
        """Return the link before the first record."""
        if header == self._header:
            return blake2b(header, digest_size=LINK_BYTES).digest()
        try:
            if header[: len(MAGIC)] != MAGIC:
                raise ValueError
            length = struct.unpack_from("<I", header, len(MAGIC))[0]
            found = json.loads(header[len(MAGIC) + 4 :][:length])
            differs = next(name for name, value in self._identity.items() if found.get(name) != value)
        except (ValueError, RecursionError, struct.error, AttributeError, StopIteration):
            raise DamagedFileError("the file is damaged") from None
        raise (OtherModelError if differs == "model" else DamagedFileError)(f"they are of another {differs}")

    def record_bytes(self, quantized: bool) -> int:
        """Return the bytes of a record of an 8-bit or full-precision page."""
        return self._head_bytes + self._page_bytes[quantized]

    def _at(self, record: int) -> int:
        return self.links[record - 1].end if record else HEADER_BYTES


def blocks_of(blocks: Sequence[Tensor]) -> bytes:
    """Return a page, given as one block per layer, as bytes."""
    return b"".join(block.contiguous().view(torch.uint8).numpy().tobytes() for block in blocks)


def _link(before: bytes, body: bytes) -> bytes:
    return blake2b(before + body, digest_size=LINK_BYTES).digest()


def _write(file: Any, data: bytes) -> None:
    """Write all of ``data``; after a short write, the next attempt raises the reason."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
