"""Variables of a chat template, as people write them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvchat.errors import UsageError

GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # to every template


def parse_args(args: Iterable[str]) -> dict[str, Any]:
    """The variables of ``KEY=VALUE``: a value is JSON (``true``, ``3``, ``["a"]``), True or False, else text.

    Raises:
        UsageError: one is not written so, or is given to every template by kvchat.
    """
    variables = {}
    for text in args:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f'"{text[:100]}" is no variable of a template.', hint="Write it as enable_thinking=false.")
        if name in GIVEN:
            raise UsageError(f"{name} is given to the template by kvchat.", hint="Choose another name.")
        variables[name] = _value(value)
    return variables


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
