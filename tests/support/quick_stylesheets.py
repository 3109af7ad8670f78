"""Textual's style sheets, faster: every application of a process uses the same ones, which are parsed once."""

from __future__ import annotations

from typing import Any

from textual.css.stylesheet import Stylesheet

_parse_rules = Stylesheet._parse_rules
_parsed: dict[tuple[Any, ...], list[Any]] = {}


def install() -> None:
    """Let all sheets of this process share what was parsed with the same variables; the results are the same."""
    Stylesheet._parse_rules = _parse_once  # type: ignore[method-assign]


def _parse_once(self: Stylesheet, css: str, *args: Any, **named: Any) -> list[Any]:
    key = (css, args, tuple(sorted(named.items())), tuple(self._variables.items()))
    if key not in _parsed:
        _parsed[key] = _parse_rules(self, css, *args, **named)
    return _parsed[key]
