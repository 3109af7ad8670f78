"""Arguments of commands as words, and values written ``key=value``."""

from __future__ import annotations

import shlex

from kvchat.errors import UsageError
from kvchat.protocol.figures import Params


def split_words(argument: str) -> list[str]:
    """Split an argument as a shell does.

    Raises:
        UsageError: a quotation mark is not closed.
    """
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"The argument {argument} cannot be read.", f"{error}.", "Close the quotation.") from None


def parse_assignments(words: list[str]) -> Params:
    """Parse ``["budget=512", "first_full=no"]``.

    Raises:
        UsageError: a word without ``=``.
    """
    params: Params = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError(
                f'"{word}" is not a parameter.', hint="Parameters are written key=value, as in budget=512."
            )
        params[key] = parse_literal(text)
    return params


def parse_literal(text: str) -> int | float | bool | str:
    """Parse a number or a truth value; any other text stays as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}.get(text.lower(), text)
