"""Changes config.toml, and keeps the comments, the order and the layout that a person wrote.

An existing key gets its new value in place. A new key follows its table's header, or else goes into a new table at the
end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli
import tomlkit
from tomlkit.items import InlineTable

from kvchat import files
from kvchat.config.sources import KEYS, Key, check, file_source, flatten

Table = MutableMapping[str, Any]


def save(path: Path, changes: Mapping[Key, Any]) -> None:
    """Write ``changes`` into the settings file, which need not exist; None removes a key.

    Raises:
        UsageError: the file is not TOML, has a wrong value, or cannot be read or written; it is unchanged.
    """
    check(file_source(path))
    text = files.read_text(path) if path.exists() else ""
    for key, value in changes.items():
        text = _with(text, key, list(value) if isinstance(value, tuple) else value)
    files.save(path, text.encode("utf-8", "replace"), "Check its permissions.")


def _with(text: str, key: Key, value: Any) -> str:
    document = tomlkit.parse(text)
    if found := _find(document, key):
        table, name = found
        if value is None:
            del table[name]
        else:
            table[name] = value
    if found or value is None:
        return tomlkit.dumps(document)
    inserted = _below_header(text, key, value)
    with suppress(tomli.TOMLDecodeError):
        if flatten(tomli.loads(inserted)) == {**flatten(tomli.loads(text)), key: value}:
            return inserted
    table = document
    for name in key[:-1]:
        inside = isinstance(table, InlineTable)
        table = table.setdefault(name, tomlkit.inline_table() if inside else tomlkit.table())
    table[key[-1]] = value
    return tomlkit.dumps(document)


def _find(document: Table, key: Key) -> tuple[Table, str] | None:
    """Return the table that has the key, and the key's name in it; an action's id may be written without quotes."""
    spelled = [key, (KEYS, *key[1].split("."))] if key[0] == KEYS else [key]
    for *parents, name in spelled:
        table: Any = document
        for parent in parents:
            table = table.get(parent, {}) if isinstance(table, MutableMapping) else {}
        if isinstance(table, MutableMapping) and name in table:
            return table, name
    return None


def _below_header(text: str, key: Key, value: Any) -> str:
    """Return ``text`` with the setting below its table's header, or in a new table at the end if there is none."""
    name = ".".join(key[:-1])
    header = re.search(rf"^\[{re.escape(name)}\][^\n]*$", text, re.MULTILINE)
    if header:
        return f"{text[: header.end()]}\n{_assignment(key, value)}{text[header.end() :]}"
    gap = "\n\n" if text.strip() else ""
    return f"{text.rstrip()}{gap}[{name}]\n{_assignment(key, value)}\n"


def _assignment(key: Key, value: Any) -> str:
    return tomlkit.dumps({key[-1]: value}).strip()
