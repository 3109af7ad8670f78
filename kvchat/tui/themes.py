"""Themes: TOML files with the fields of a Textual theme; the ribbon's colors are under ``[variables]``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme

from kvchat import files
from kvchat.errors import UsageError, did_you_mean
from kvchat.files import unmarked
from kvchat.paths import bundled_themes_dir

DEFAULT = "kvchat-dark"
ANSI = "kvchat-ansi"
DIM = 0.75  # how much of its color dim text keeps; terminals differ, and many make it too faint to read
HINTS = {"text-disabled": "auto 52%"}  # Textual's 38 % leaves less than 3:1 on light backgrounds
# For themes without them: readable on dark and light.
RIBBON_DEFAULTS = {
    "ribbon-sink": "#c792ea",
    "ribbon-window": "#5ab0f6",
    "ribbon-device": "#3fb68b",
    "ribbon-recalled": "#f5a742",
    "ribbon-host": "#6b7685",
    "ribbon-lost": "#565c66",
    "ribbon-tick": "#e06c75",
}
_COLORS = {
    *("primary", "secondary", "warning", "error", "success", "accent"),
    *("foreground", "background", "surface", "panel", "boost"),
}


def suited() -> str:
    """Return the default theme: the terminal's own colors if it has only 16, or if NO_COLOR is set."""
    colors: Any = os.environ.get("TEXTUAL_COLOR_SYSTEM", "auto")  # as Textual asks
    terminal = Console(force_terminal=True, color_system=colors)
    return ANSI if terminal.no_color or terminal.color_system == "standard" else DEFAULT


def load_all(directories: Iterable[Path]) -> tuple[dict[str, Theme], list[UsageError]]:
    """Return the bundled themes and those in ``directories`` by name (the last wins), and the invalid ones' errors."""
    themes: dict[str, Theme] = {}
    problems: list[UsageError] = []
    for directory in (bundled_themes_dir(), *directories):
        for path in sorted(directory.glob("*.toml")):
            try:
                theme = load(path)
            except UsageError as problem:
                problems.append(problem)
            else:
                themes[theme.name] = theme
    return themes, problems


def load(path: Path) -> Theme:
    """Return the theme in one file, named like the file unless it has a name.

    Raises:
        UsageError: the file cannot be read, is not TOML or has a wrong field or color; the message has file and reason.
    """
    try:
        fields = {"name": path.stem, **files.toml(unmarked(files.read(path).decode()))}
        _check(fields)
        theme = Theme(**fields)
        # Readable hints; for a theme of the terminal's colors the variables that Textual's style sheets need.
        base = BUILTIN_THEMES["ansi-dark" if theme.dark else "ansi-light"].variables if theme.ansi else HINTS
        return dataclasses.replace(theme, variables={**base, **theme.variables})
    except (OSError, ValueError, TypeError, RecursionError) as error:  # TOML and UTF-8 errors are ValueErrors
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise UsageError(f"The theme {path} cannot be used.", f"{reason}.", "Repair it, or remove the file.") from None


def _check(fields: dict[str, object]) -> None:
    known = [field.name for field in dataclasses.fields(Theme)]
    for key in fields:
        if key not in known:
            raise ValueError(f'there is no field "{key}". {did_you_mean(key, known)}')
    if "primary" not in fields:
        raise ValueError("the field primary is missing")
    variables = fields.get("variables", {})
    if not isinstance(variables, dict):
        raise ValueError("variables is not a table")
    colors = {key: value for key, value in fields.items() if key in _COLORS}
    colors |= {key: value for key, value in variables.items() if key in RIBBON_DEFAULTS}
    for key, value in colors.items():
        try:
            Color.parse(str(value))
        except ColorParseError:
            raise ValueError(f'{key} = "{value}" is not a color; write it as "#rrggbb"') from None
