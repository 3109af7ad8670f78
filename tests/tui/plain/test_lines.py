"""Lines in and out: split and joined as a person meant them, and nothing but text comes out."""

from __future__ import annotations

import asyncio
import io
import os

import pytest

from kvchat.errors import UsageError
from kvchat.tui.plain.view import LineReader, LineWriter, spoken


class Arriving(LineReader):
    """Bytes that arrive a few at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(-1)
        self._pieces = [data[start : start + step] for start in range(0, len(data), step)]

    async def _read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one\ntwo\r\n\nthree", ["one", "two", "", "three"]),
        (b"one\\\nand more\\\nof it\ntwo\n", ["one\nand more\nof it", "two"]),
        (b"one\\\nlast", ["one\nlast"]),
        ("schön ✓\n".encode(), ["schön ✓"]),
        (b"latin \xfc\n", ["latin \ufffd"]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
    ],
)
async def test_lines_are_read(data, lines, step):
    assert [line async for line in Arriving(data, step)] == lines


async def test_a_pipe_is_read_to_its_end():
    receiving, sending = os.pipe()
    os.write(sending, b"one\ntw")
    asyncio.get_running_loop().call_soon(lambda: (os.write(sending, b"o"), os.close(sending)))
    assert [line async for line in LineReader(receiving)] == ["one", "two"]
    os.close(receiving)


@pytest.mark.parametrize(
    ("arriving", "lines"),
    [
        (b"int a; // one \\\n/usr/bin/x\n\nfour\n", [("int a; // one \\\n/usr/bin/x\n\nfour", True)]),
        (b"one\n", [("one", False)]),
        (b"/mode full\n/set\n", [("/mode full", False), ("/set", False)]),
    ],
)
async def test_lines_that_a_terminal_delivers_at_once_are_one_paste(arriving, lines):
    keyboard, terminal = os.openpty()
    os.write(keyboard, arriving)
    reader, read = LineReader(terminal), []
    async for line in reader:
        read.append((line, reader.is_pasted))
        if len(read) == len(lines):
            os.write(keyboard, b"\x04")
    assert read == lines
    os.close(keyboard)
    os.close(terminal)


async def test_a_plain_file_is_read(tmp_path):
    (tmp_path / "lines").write_bytes(b"one\ntwo\n")
    with (tmp_path / "lines").open() as file:
        assert [line async for line in LineReader(file.fileno())] == ["one", "two"]


async def test_a_line_without_end_is_refused_and_lets_others_run():
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    with open("/dev/zero") as endless, pytest.raises(UsageError, match="stdin"):
        await anext(aiter(LineReader(endless.fileno())))
    counting.cancel()
    assert turns > 10


def test_text_goes_on_in_a_line_and_lines_stand_alone():
    out, errors = io.StringIO(), io.StringIO()
    lines = LineWriter(out, errors)
    lines.text("model: a")
    lines.text("b\x1b[31m")
    lines.line("[12 tok · full]")
    lines.text("c\n")
    lines.problem("── wrong: \x9b ──")
    lines.ask()
    assert out.getvalue() == "model: ab␛[31m\n[12 tok, full]\nc\n"
    assert errors.getvalue() == "wrong: ‹U+009B›\n"


def test_the_prompt_gives_way_to_what_is_said():
    out = io.StringIO()
    lines = LineWriter(out, out, "> ")
    lines.ask()
    lines.ask()
    lines.entered()
    lines.text("model: a")
    lines.ask()
    lines.line("[note]")
    assert out.getvalue() == "> model: a\n> \n[note]\n"


def test_signs_become_words():
    assert spoken("full → sync · “x” …\nkept") == 'full to sync, "x" ...\nkept'
