"""The current keys, which come from the table of actions unless the user changed them, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping

from textual.keys import Keys

from kvchat.errors import UsageError, check_known
from kvchat.tui.actions import ACTIONS, BY_ID, LETTERS, Action, scopes_at

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


def keys_of(action: Action, rebound: Mapping[str, str]) -> list[str]:
    """Return the keys of an action; ``rebound`` holds the changed ones by the id of their action."""
    return [key.strip() for key in rebound.get(action.id, action.keys).lower().split(",") if key.strip()]


def describe_keys(action: Action, rebound: Mapping[str, str]) -> str:
    """Name the keys of an action for people: ``PgUp``, ``↑ / ↓``."""
    return " / ".join(map(describe_key, keys_of(action, rebound)))


def check_keys(rebound: Mapping[str, str]) -> None:
    """Check changed keys.

    Raises:
        UsageError: an action is unknown or its keys are built in; a key is invalid, types text or has two actions.
    """
    bindable = {action.id: action for action in ACTIONS if action.is_bindable}
    for id in rebound:
        if id in BY_ID and id not in bindable:
            raise UsageError(f"The keys of {id} are built in.", hint="kvchat keys --json says which can be changed.")
        check_known(id, bindable, "action")
        keys = keys_of(bindable[id], rebound)
        given = f'The key "{",".join(keys)}" of {id} is not valid.'
        if not keys or not all(map(is_key, keys)):
            raise UsageError(given, hint="Keys are written as in f9, ctrl+n or shift+f6.")
        if bindable[id].scope not in LETTERS and any(len(key) == 1 or key == "space" for key in keys):
            raise UsageError(given, "That key types text.", "Use a function key, or one with ctrl or alt.")
    owners: dict[str, list[Action]] = {}
    for action in bindable.values():
        for key in dict.fromkeys(keys_of(action, rebound)):
            others = owners.setdefault(key, [])
            # Scopes that are not inside each other never have the focus together: their keys cannot clash.
            together = (
                one for one in others if one.scope in scopes_at(action.scope) or action.scope in scopes_at(one.scope)
            )
            if (other := next(together, None)) is not None:
                raise UsageError(
                    f'The key "{key}" would do two things: {other.id} and {action.id}.', hint="Use another key for one."
                )
            others.append(action)


def describe_key(key: str) -> str:
    """Name a key for people: ``shift+f6`` -> ``Shift+F6``; a letter is unchanged: its capital is another key."""
    *modifiers, last = key.split("+")
    name = NAMES.get(last, key if len(key) == 1 else last.capitalize())
    return "+".join([*(modifier.capitalize() for modifier in modifiers), name])


def hint_key(key: str) -> str:
    """Name a key in as few cells as possible: ``ctrl+p`` -> ``^P``."""
    return HINTS.get(key) or describe_key(key).replace("Ctrl+", "^")


def is_key(key: str) -> bool:
    """Return whether Textual knows the key, as in ``ctrl+shift+f6``."""
    *modifiers, last = key.split("+")
    return all(modifier in MODIFIERS for modifier in modifiers) and (last in KNOWN or len(last) == 1)
