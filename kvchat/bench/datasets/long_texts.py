"""Data sets that are texts to measure perplexity on: files of PG19 and WikiText as they are published.

A text file is one text, a row of JSON lines one more part. Parquet is not read: any of its tools writes JSON lines.
"""

from __future__ import annotations

from pathlib import Path

from kvchat.bench.datasets.json_lines import files

# PG19 is a file for each book; WikiText's files are raw or with rare words replaced.
ENDINGS: dict[str, tuple[str, ...]] = {
    "pg19": (".txt", ".jsonl"),
    "wikitext": (".raw", ".tokens", ".txt", ".jsonl"),
}


def texts(name: str, folder: Path) -> tuple[str, ...]:
    """The files of the data set ``name`` in ``folder``, for ``perplexity.Settings.texts``.

    Raises:
        UsageError: there is no such folder, or none of its files is one of the data set.
    """
    return tuple(str(file) for file in files(folder, ENDINGS[name]))
