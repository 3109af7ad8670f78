"""Presets: a system prompt, sampling and a KV mode under one name, each a TOML file in the form of config.toml.

``/preset`` saves and applies them in the chat, ``--preset`` applies one on the command line. A preset changes only the
settings in its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvchat import paths
from kvchat.config.sources import Key, SettingsSource, check, dotted, file_source
from kvchat.errors import UsageError, resolve

SYSTEM: Key = ("model", "system")
MODE: Key = ("kv", "mode")


def names() -> list[str]:
    return sorted(path.stem for path in paths.presets_dir().glob("*.toml"))


def find(name: str) -> Path:
    """Return the file of the preset that ``name`` names or abbreviates.

    Raises:
        UsageError: there is none, or ``name`` abbreviates several.
    """
    if not names():
        raise UsageError(f'There is no preset "{name}".', hint=f"To save one: /preset save {name} in the chat.")
    return _file(resolve(name, names(), "preset"))


def read(path: Path) -> SettingsSource:
    """Return the settings of a preset.

    Raises:
        UsageError: its file cannot be read, has a wrong value, or sets something that does not belong in a preset.
    """
    source = file_source(path, f"{paths.presets_dir().name}/{path.name}")
    check(source)
    for key in source.values:
        if not (key in (SYSTEM, MODE) or key[0] == "sampling" or (key[0] == "kv" and len(key) == 3)):
            raise UsageError(
                f"{source.origins[key]}: a preset does not set {dotted(key)}.",
                "It sets model.system, the table [sampling], kv.mode and the parameters of modes.",
                f"Remove it from {path}.",
            )
    return source


def save(name: str, values: Mapping[Key, Any]) -> Path:
    """Write a preset, replacing any of that name; return its file.

    Raises:
        UsageError: the name is not valid, or the file cannot be written.
    """
    from kvchat.config import settings_file  # tomlkit: 70 ms that only saving needs

    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f'"{name}" cannot be the name of a preset.', hint="Use letters, digits, - and _.")
    path = _file(name)
    replaced = dict.fromkeys(file_source(path).values)
    settings_file.save(path, {**replaced, **values})
    return path


def _file(name: str) -> Path:
    return paths.presets_dir() / f"{name}.toml"
