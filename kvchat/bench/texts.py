"""Texts to measure on: passages of books that the bundled model was not trained on, a person's own, PG19 and WikiText.

Whatever is wrong with a row of a JSON-lines file is said with its file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat.errors import UsageError
from kvchat.files import read_text

BOOKS = Path(__file__).parent / "books"
BREAK = "\n* * *\n"
# PG19 is a file for each book; WikiText's files are raw or with rare words replaced.
ENDINGS: dict[str, tuple[str, ...]] = {
    "pg19": (".txt", ".jsonl"),
    "wikitext": (".raw", ".tokens", ".txt", ".jsonl"),
}


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
            "Use a longer text, or fewer tokens.",
        )
    return found


def check(texts: Sequence[str]) -> None:
    """Refuse files that no text can be read from, before a model is loaded.

    Raises:
        UsageError: one cannot be read, or is empty.
    """
    for name in texts:
        if not _read(Path(name)).strip():
            raise UsageError(f"{name} is empty.", "", "Use a text to measure on.")


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
    return read_text(file)


@dataclass(frozen=True)
class Line:
    """A row of a file."""

    file: Path
    number: int
    fields: Mapping[str, Any]

    def within(self, folder: Path) -> str:
        """FILE:N, as the folder names it."""
        return f"{self.file.relative_to(folder).as_posix()}:{self.number}"

    def text(self, *names: str) -> str:
        """The first of the fields ``names`` that the row has; numbers are texts too.

        Raises:
            UsageError: it has none, or another kind of value.
        """
        value = next((self.fields[name] for name in names if name in self.fields), None)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise self.refusal(f"It has no text {' or '.join(map(repr, names))}.")
        return str(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of the list ``name``, one at least.

        Raises:
            UsageError: it has no such list.
        """
        values = self.fields.get(name)
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise self.refusal(f"It has no list of texts {name!r}.")
        return tuple(values)

    def refusal(self, reason: str) -> UsageError:
        """The error for a row that is not as the data set's publisher writes it."""
        return UsageError(f"{self.file}, line {self.number} is not valid.", reason, "Use the data set as published.")


def files(folder: Path, endings: Sequence[str] = (".jsonl",)) -> list[Path]:
    """Every file with one of the ``endings`` in the folder and below it, in order.

    Raises:
        UsageError: there is no such folder, or no such file in it.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Use the folder with the data set's files.")
    found = sorted(path for path in folder.rglob("*") if path.suffix in endings and path.is_file())
    if not found:
        raise UsageError(
            f"{folder} has no file that ends in {' or '.join(endings)}.",
            "The data set consists of such files.",
            "Use the folder with the data set's files.",
        )
    return found


def lines(file: Path) -> Iterator[Line]:
    """The rows of a file, empty lines left out.

    Raises:
        UsageError: it cannot be read, or a line is no JSON object.
    """
    for number, text in enumerate(read_text(file).split("\n"), 1):
        if text.strip():
            yield Line(file, number, _object(file, number, text))


def _object(file: Path, number: int, text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}, line {number} is not JSON.", f"{error}.", "Download the file again.") from None
    if not isinstance(fields, dict):
        raise UsageError(
            f"{file}, line {number} is not valid.", "It is JSON, but not an object.", "Download the file again."
        )
    return fields
