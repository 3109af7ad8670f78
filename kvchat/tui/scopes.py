"""Scopes of keys: the application, a screen, or a widget that has the focus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Scope = Literal[
    "app", "chat", "prompt", "transcript", "ribbon", "panels", "search", "conversations", "title", "models",
    "settings", "compare", "details", "map", "help",
]  # fmt: skip
WIDGETS: tuple[Scope, ...] = (
    "prompt", "transcript", "ribbon", "panels", "search", "conversations", "title", "models", "map",
)  # fmt: skip
"""A key of another scope goes before those of the focused widget."""
LETTERS: tuple[Scope, ...] = ("transcript", "ribbon", "panels", "compare", "details", "map", "help")
"""Nothing is typed here, so that a letter may be a key."""
_AROUND: dict[Scope, tuple[Scope, ...]] = {
    "app": ("chat", "search", "title", "settings", "compare", "details", "help"),
    "chat": ("prompt", "transcript", "ribbon", "panels"),
    "search": ("conversations", "models"),
    "details": ("map",),
}


def scopes_at(scope: Scope) -> Iterator[Scope]:
    """The scopes whose keys act where ``scope`` is: its own and those around it."""
    yield scope
    for outer, inner in _AROUND.items():
        if scope in inner:
            yield from scopes_at(outer)
