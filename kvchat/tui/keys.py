"""Keys as Textual names them (``shift+f6``) and as people read them (``Shift+F6``)."""

from __future__ import annotations

from textual.keys import Keys

MODIFIERS = ("ctrl", "shift", "alt")
NAMES = {
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "left": "←",
    "right": "→",
    "up": "↑",
    "down": "↓",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
}
HINTS = {"enter": "⏎", "escape": "esc"}
KNOWN = {key.value for key in Keys}


def describe_key(key: str) -> str:
    """Name a key for people: ``shift+f6`` -> ``Shift+F6``."""
    *modifiers, last = key.split("+")
    return "+".join([*(modifier.capitalize() for modifier in modifiers), NAMES.get(last, last.capitalize())])


def hint_key(key: str) -> str:
    """Name a key in as few cells as possible: ``ctrl+p`` -> ``^P``."""
    return HINTS.get(key) or describe_key(key).replace("Ctrl+", "^")


def is_key(key: str) -> bool:
    """True if Textual knows the key; modifiers come first, joined by ``+``."""
    *modifiers, last = key.split("+")
    return all(modifier in MODIFIERS for modifier in modifiers) and (last in KNOWN or len(last) == 1)


def types_text(key: str) -> bool:
    """True if a key alone writes into the prompt."""
    return len(key) == 1 or key == "space"
