"""The list above the prompt while a command is typed: commands, then what their arguments may be."""

from __future__ import annotations

from collections.abc import Sequence

from kvchat.errors import UsageError
from kvchat.tui.action import Action
from kvchat.tui.actions import ACTIONS, ALIASES, COMMANDS, OFTEN, find_command, is_command
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.prompt.suggestions import Offer, Suggestion

PATHS = ("FILE", "PATH")  # arguments that name a file


def offer(before: str, now: Surroundings) -> Offer | None:
    """The offer for the end of ``before``, the text before the cursor: a command, its argument or a file."""
    if not is_command(before):
        return mentions.offer(before, now.entries)
    name, space, argument = before.removeprefix("/").partition(" ")
    return _argument(name, argument, now) if space else _names(name)


def _names(typed: str) -> Offer | None:
    found = [action for name, action in COMMANDS.items() if name.startswith(typed.lower())]
    found += [action for alias, action in ALIASES.items() if typed and alias.startswith(typed.lower())]
    if not found and len(typed) > 1:
        found = [action for name, action in COMMANDS.items() if typed.lower() in name]
    rows = [_command(action) for action in sorted(ACTIONS, key=_rarity) if action in found]
    is_begun = len(rows) > 1 and typed.lower() not in (*COMMANDS, *ALIASES)  # sent, it would name no one command
    return Offer(f"/{typed}", tuple(rows), takes_by_enter=is_begun) if rows else None


def _rarity(action: Action) -> int:
    return OFTEN.index(action.id) if action.id in OFTEN else len(OFTEN)


def _command(action: Action) -> Suggestion:
    others = f"  (also {', '.join(f'/{alias}' for alias in action.aliases)})" if action.aliases else ""
    return Suggestion(f"/{action.command}{' ' * bool(action.usage)}", action.line, action.doc + others)


def _argument(name: str, argument: str, now: Surroundings) -> Offer | None:
    try:
        action = find_command(name.lower())
    except UsageError:
        return None
    if not action.usage:
        return None
    typed, rows = _values(action, argument, now)
    return Offer(typed, tuple(rows), f"{action.line}   {action.doc}")


def _values(action: Action, argument: str, now: Surroundings) -> tuple[str, Sequence[Suggestion]]:
    """The word of the argument that is being typed, and what may take its place."""
    if action.usage in PATHS:
        return argument, mentions.matching(argument, now.entries)
    *words, typed = argument.split(" ")
    found = list(action.values(now, list(filter(None, words)))) if action.values else []
    begun = [one for one in found if one.text.lower().startswith(typed.lower())]
    return typed, begun or [one for one in found if len(typed) > 1 and typed.lower() in one.text.lower()]
