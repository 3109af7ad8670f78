"""``kvchat keys``: what can be done, by which key and which command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvchat.cli.output import echo

if TYPE_CHECKING:
    from kvchat.tui.action import Action


def list_keys(rebound: Mapping[str, str], as_json: bool) -> None:
    """Print every action with its keys in force, where ``rebound`` are those of the settings by id.

    Raises:
        UsageError: a changed key cannot be used.
    """
    from kvchat.tui.actions import ACTIONS  # imports textual
    from kvchat.tui.rebinding import check_keys, describe_keys

    check_keys(rebound)
    if as_json:
        echo(json.dumps([_as_json(action, rebound) for action in ACTIONS], indent=2, ensure_ascii=False))
        return
    rows = [(describe_keys(action, rebound), action.id, action.line if action.command else "") for action in ACTIONS]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row, action in zip(rows, ACTIONS, strict=True):
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        echo("  ".join([*cells, action.doc]))
    echo('\nOther keys stand in config.toml under [keys], as in mode.next = "f12"; built-in ones cannot be changed.')


def _as_json(action: Action, rebound: Mapping[str, str]) -> dict[str, object]:
    from kvchat.tui.rebinding import keys_of

    return {
        "id": action.id,
        "keys": keys_of(action, rebound),
        "default_keys": keys_of(action, {}),
        "can_be_changed": action.is_bindable,
        "command": action.line if action.command else None,
        "where": action.scope,
        "doc": action.doc,
    }
