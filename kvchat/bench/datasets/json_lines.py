"""Rows of JSON-lines files of a data set: whatever is wrong with one is said with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvchat import text_file
from kvchat.errors import UsageError


@dataclass(frozen=True)
class Line:
    """A row of a file; ``place`` names it for a person."""

    file: Path
    number: int
    fields: Mapping[str, Any]

    @property
    def place(self) -> str:
        """FILE, line N."""
        return f"{self.file}, line {self.number}"

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
        return UsageError(f"{self.place} is refused.", reason, "Give the data set as it was published.")


def files(folder: Path, endings: Sequence[str] = (".jsonl",)) -> list[Path]:
    """Every file with one of the ``endings`` in the folder and below it, in order.

    Raises:
        UsageError: there is no such folder, or no such file in it.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Give the folder that holds the data set's files.")
    found = sorted(path for path in folder.rglob("*") if path.suffix in endings and path.is_file())
    if not found:
        raise UsageError(
            f"{folder} has no file that ends in {' or '.join(endings)}.",
            "The data set is such files.",
            "Give the folder that holds the data set's files.",
        )
    return found


def lines(file: Path) -> Iterator[Line]:
    """The rows of a file, empty lines left out.

    Raises:
        UsageError: it cannot be read, or a line is no JSON object.
    """
    for number, text in enumerate(text_file.read(file).split("\n"), 1):
        if text.strip():
            yield Line(file, number, _object(file, number, text))


def _object(file: Path, number: int, text: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}, line {number} is no JSON.", f"{error}.", "Download the file again.") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{file}, line {number} is refused.", "It is JSON, but no object.", "Download the file again.")
    return fields
