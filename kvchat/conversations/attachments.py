"""Files in a question: sent in a code fence under their name, shown as one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvchat.units import size

MAX_BYTES = 2**24  # of a file, while no model is loaded whose context would limit it
BYTES_PER_TOKEN = 8  # of text, more than any tokenizer's average
_FENCED = re.compile(r"^File ([^\n]+):\n(`{3,})[^\n`]*\n(.*?)^\2$", re.MULTILINE | re.DOTALL)


class Piece(NamedTuple):
    """A part of a question: the fenced ``text`` of the file ``name``, or text that the user wrote, without a name.

    The file's own text is ``text[begin:end]``, inside the fence.
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
    """Return ``text`` under its name, in a fence longer than any in it."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    language = Path(name).suffix[1:]
    name = name.replace("\n", "\N{SYMBOL FOR NEWLINE}")
    end = "" if text.endswith("\n") or not text else "\n"
    return f"File {name}:\n{fence}{language if language.isalnum() else ''}\n{text}{end}{fence}"


def pieces(question: str) -> Iterator[Piece]:
    """Split a question into fenced files and the text around them."""
    end = 0
    for found in _FENCED.finditer(question):
        if found.start() > end:
            yield Piece(question[end : found.start()])
        end = found.end()
        yield Piece(found[0], found[1], found.start(3) - found.start(), found.end(3) - found.start())
    if end < len(question):
        yield Piece(question[end:])


def written(question: str) -> str:
    """Return the text that the user wrote around the files of a question, or the files' labels if there is none."""
    return "\n".join(piece.text for piece in pieces(question) if not piece.name).strip() or folded(question)


def folded(question: str) -> str:
    """Return a question with each file replaced by a label on its own line."""
    found = list(pieces(question))
    if not any(piece.name for piece in found):
        return question
    return "\n".join(filter(None, (piece.label if piece.name else piece.text.strip("\n") for piece in found)))
