"""Passages of book text that the bundled model was not trained on, or of a person's own texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat import text_file
from kvchat.bench.datasets.json_lines import lines
from kvchat.errors import UsageError

BOOKS = Path(__file__).parent / "books"
BREAK = "\n* * *\n"


@dataclass(frozen=True)
class Passage:
    """Consecutive ids of a text."""

    text: str
    ids: tuple[int, ...]


def passages(texts: Sequence[str], size: int, tokenizer: Any, joined: bool = False) -> list[Passage]:
    """Cut the files ``texts`` (none: the shipped books) into passages of ``size`` ids.

    A line of three asterisks separates parts, an empty line paragraphs; a single line break is a space. A row of
    ``.jsonl`` is a part, its field ``text``. No passage goes beyond a part, unless the parts are ``joined``, as they
    are where none of a file's is long enough.

    Raises:
        UsageError: a file cannot be read, or no text is long enough.
    """
    files = [Path(name) for name in texts] or sorted(BOOKS.glob("*.txt"))
    found = [passage for file in files for passage in _of_file(file, size, tokenizer, joined)]
    if not found:
        raise UsageError(
            "The text is too short to measure on.",
            f"A passage has {size:,} tokens; none of the texts has that many.",
            "Give a longer text, or fewer tokens.",
        )
    return found


def check(texts: Sequence[str]) -> None:
    """Refuse files that no text can be read from, before a model is loaded.

    Raises:
        UsageError: one cannot be read, or is empty.
    """
    for name in texts:
        if not _read(Path(name)).strip():
            raise UsageError(f"{name} is empty.", "", "Give a text to measure on.")


def _of_file(file: Path, size: int, tokenizer: Any, joined: bool) -> list[Passage]:
    text = _read(file)
    by_part = [] if joined else [*_cut(file.stem, text.split(BREAK), size, tokenizer)]
    return by_part or [*_cut(file.stem, [text.replace(BREAK, "\n")], size, tokenizer)]


def _cut(name: str, parts: Sequence[str], size: int, tokenizer: Any) -> Iterator[Passage]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size -= len(begin)
    for part in parts:
        ids = tokenizer.encode(re.sub(r"(?<!\n)\n(?!\n)", " ", part.strip()), add_special_tokens=False)
        for start in range(0, len(ids) - size + 1, size):
            yield Passage(name, (*begin, *ids[start : start + size]))


def _read(file: Path) -> str:
    if file.suffix == ".jsonl":
        return BREAK.join(line.text("text") for line in lines(file))
    return text_file.read(file)
