"""Suggestions for the text being typed: the list above the prompt."""

from __future__ import annotations

from typing import NamedTuple


class Suggestion(NamedTuple):
    """``text`` takes the place of what is typed; ``label`` and ``doc`` are shown.

    ``is_present`` marks what is in force.
    """

    text: str
    label: str
    doc: str = ""
    is_present: bool = False


class Offer(NamedTuple):
    """``typed`` is the end of the text before the cursor that a suggestion replaces; ``usage`` tells what is expected.

    Tab takes a suggestion; Enter does so where ``takes_by_enter``, else only one chosen by the arrows.
    """

    typed: str
    suggestions: tuple[Suggestion, ...]
    usage: str = ""
    takes_by_enter: bool = False
