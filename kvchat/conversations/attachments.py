"""Files in a question: sent in a fence that names the file, shown as one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvchat.units import size

MAX_BYTES = 2**24  # of a file, while no model says how much it reads
BYTES_PER_TOKEN = 8  # more than any tokenizer packs into a token of text on average
_FENCED = re.compile(r"^File ([^\n]+):\n(`{3,})[^\n`]*\n(.*?)^\2$", re.MULTILINE | re.DOTALL)


class Piece(NamedTuple):
    """A part of a question: ``name`` is the file whose fenced ``text`` it is, empty for what was written.

    A file begins and ends at these characters of the text, inside the fence.
    """

    text: str
    name: str = ""
    begin: int = 0
    end: int = 0

    @property
    def label(self) -> str:
        """The file in a few words: ``[notes.txt · 4.2 KiB]``."""
        return f"[{self.name} · {size(len(self.text[self.begin : self.end].encode('utf-8', 'replace')))}]"


def fenced(name: str, text: str) -> str:
    """``text`` as it is sent: under its name, in a fence longer than any in it."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    language = Path(name).suffix[1:]
    name = name.replace("\n", "\N{SYMBOL FOR NEWLINE}")
    end = "" if text.endswith("\n") or not text else "\n"
    return f"File {name}:\n{fence}{language if language.isalnum() else ''}\n{text}{end}{fence}"


def pieces(question: str) -> Iterator[Piece]:
    """Split a question into the files that were fenced into it and what was written."""
    end = 0
    for found in _FENCED.finditer(question):
        if found.start() > end:
            yield Piece(question[end : found.start()])
        end = found.end()
        yield Piece(found[0], found[1], found.start(3) - found.start(), found.end(3) - found.start())
    if end < len(question):
        yield Piece(question[end:])


def folded(question: str) -> str:
    """A question with a label in place of each file, a line each."""
    found = list(pieces(question))
    if not any(piece.name for piece in found):
        return question
    return "\n".join(filter(None, (piece.label if piece.name else piece.text.strip("\n") for piece in found)))
