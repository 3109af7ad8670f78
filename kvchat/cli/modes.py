"""``kvchat modes``: the KV modes, their parameters and defaults."""

from __future__ import annotations

import json
from typing import Any

from kvchat.cli.output import echo, note
from kvchat.config import modes
from kvchat.config.modes import ModeParameters


def list_modes(as_json: bool) -> None:
    """Print every mode on stdout, and on stderr what was left out."""
    infos = [_info(parameters) for parameters in modes.registered().values()]
    if as_json:
        echo(json.dumps(infos, indent=2))
    else:
        echo("\n".join(_describe(info) for info in infos))
    for problem in modes.problems():
        note(problem)


def _info(parameters: type[ModeParameters]) -> dict[str, Any]:
    """One mode; a parameter whose ``default`` is None is chosen by kvchat."""
    fields, defaults = parameters.model_fields, parameters().model_dump()
    return {
        "name": parameters.name,
        "title": parameters.title,
        "params": [{"name": name, "default": defaults[name], "doc": fields[name].description or ""} for name in fields],
        "figures": dict(parameters.figures),
    }


def _describe(info: dict[str, Any]) -> str:
    cells = [(p["name"], "auto" if p["default"] is None else str(p["default"]), p["doc"]) for p in info["params"]]
    name_width, default_width = (max(len(row[column]) for row in cells) for column in (0, 1))
    rows = [f"  {name:<{name_width}} {default:<{default_width}} {doc}" for name, default, doc in cells]
    return "\n".join((f"{info['name']:<12} {info['title']}", *rows))
