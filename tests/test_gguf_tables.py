"""Whatever the beginning of a GGUF file says, it is refused at once, or the package that reads it comes to an end."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.frames import fuzzed
from support.gguf_files import gguf_header

from kvchat import gguf_tables

HEADER = gguf_header(("output_norm", (64,), 0), ("blk.0", (64, 32), 0)) + bytes(9000)
EXTREMES = [0, 1, 2, 8, 9, 13, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def lying(place: bytes, value: int, before: bytes) -> bytes:
    """The header with another eight bytes behind the first ``place``; they were ``before``."""
    assert HEADER.count(place + before) == 1
    return HEADER.replace(place + before, place + struct.pack("<Q", value))


SCORES, TOKENS = struct.pack("<II", 9, 6), struct.pack("<II", 9, 8)
TWO = struct.pack("<Q", 2)
VERSION = b"GGUF" + struct.pack("<I", 3)
LIES = {
    "a list of 2**60 numbers": lying(SCORES, 2**60, TWO),
    "a list of numbers to the end": lying(SCORES, 10**4, TWO),
    "a list of 2**60 texts": lying(TOKENS, 2**60, TWO),
    "a list of lists": HEADER.replace(SCORES, struct.pack("<II", 9, 9)),
    "2**60 tensors": lying(VERSION, 2**60, TWO),
    "a text of 2**60": HEADER.replace(struct.pack("<Q", 20), struct.pack("<Q", 2**60)),
    "a text of 2**64 - 1": HEADER.replace(struct.pack("<Q", 20), struct.pack("<Q", 2**64 - 1)),
    "2**32 - 1 dimensions": HEADER.replace(b"blk.0" + struct.pack("<I", 2), b"blk.0" + struct.pack("<I", 2**32 - 1)),
    "no type": HEADER.replace(SCORES, struct.pack("<II", 99, 6)),
    "another file": b"not at all",
    "nothing": b"",
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_what_lies_is_refused(tmp_path: Path, content: bytes) -> None:
    assert content != HEADER
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        gguf_tables.tensors(tmp_path / "x.gguf")


def test_the_tensors_of_either_byte_order(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(HEADER)
    begin = len(HEADER) - 9000 + -(len(HEADER) - 9000) % 32
    table = ("blk.0", 0, (64, 32), begin + 64 * 32 * 4)
    assert gguf_tables.tensors(tmp_path / "x.gguf") == [("output_norm", 0, (64,), begin + 64 * 4), table]
    name = struct.pack(">Q", 1) + b"a"
    tensor = name + struct.pack(">IQIQ", 1, 64, 8, 96)
    key = struct.pack(">Q", 17) + b"general.alignment"
    for aligned in (64, 1024):
        start = struct.pack(">4sIQQ", b"GGUF", 3, 1, 1) + key + struct.pack(">II", 4, aligned) + tensor
        (tmp_path / "x.gguf").write_bytes(start)
        begin = -(-len(start) // aligned) * aligned
        assert gguf_tables.tensors(tmp_path / "x.gguf") == [("a", 8, (64,), begin + 96 + 2 * 34)]


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_what_is_not_refused_the_package_reads_to_an_end(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = tmp_path / "x.gguf"
    taken = []

    @fuzzed
    @example([])
    @given(
        st.lists(
            st.tuples(st.integers(0, len(HEADER) - 8), st.sampled_from(EXTREMES), st.sampled_from("IQ")), max_size=3
        )
    )
    def mutate(changes: list[tuple[int, int, str]]) -> None:
        content = bytearray(HEADER)
        for at, value, form in changes:
            struct.pack_into(f"<{form}", content, at, value % 256 ** struct.calcsize(form))
        path.write_bytes(content)
        try:
            gguf_tables.tensors(path)
        except ValueError:
            return
        try:
            GGUFReader(path)
        except Exception:  # noqa: BLE001  # it raises anything
            return
        taken.append(tuple(changes))

    mutate()
    assert () in taken


def test_types_are_those_of_the_package():
    gguf = pytest.importorskip("gguf")
    sizes = {kind: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    theirs = {int(kind): (kind.name, 8 * nbytes / elements) for kind, (elements, nbytes) in sizes.items()}
    assert {kind: gguf_tables.type_of(kind) for kind in theirs} == theirs
