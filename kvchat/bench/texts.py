"""Texts to measure on: passages of books that the bundled model was not trained on, or of the user's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat.errors import UsageError
from kvchat.files import read_text

BOOKS = Path(__file__).parent / "books"
BREAK = "\n* * *\n"


@dataclass(frozen=True)
class Passage:
    """Consecutive ids of a text."""

    text: str
    ids: tuple[int, ...]


def passages(texts: Sequence[str], size: int, tokenizer: Any) -> list[Passage]:
    """Cut the files ``texts`` (none: the bundled books) into passages of ``size`` ids.

    An empty line separates paragraphs; a single line break is a space, and a line of three asterisks is left out.

    Raises:
        UsageError: a file cannot be read, or no text is long enough.
    """
    files = [Path(name) for name in texts] or sorted(BOOKS.glob("*.txt"))
    found = [passage for file in files for passage in _cut(file, size, tokenizer)]
    if not found:
        raise UsageError(
            "The text is too short to measure on.",
            f"A passage has {size:,} tokens; none of the texts has that many.",
            "Use a longer text, or fewer tokens.",
        )
    return found


def check(texts: Sequence[str]) -> None:
    """Refuse unreadable and empty files, before a model is loaded."""
    for name in texts:
        if not read_text(Path(name)).strip():
            raise UsageError(f"{name} is empty.", "", "Use a text to measure on.")


def _cut(file: Path, size: int, tokenizer: Any) -> Iterator[Passage]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size -= len(begin)
    text = read_text(file).replace(BREAK, "\n").strip()
    ids = tokenizer.encode(re.sub(r"(?<!\n)\n(?!\n)", " ", text), add_special_tokens=False)
    for start in range(0, len(ids) - size + 1, size):
        yield Passage(file.stem, (*begin, *ids[start : start + size]))
