"""kvchat modes."""

from __future__ import annotations

import json

from support.command_line import Run

from kvchat.config.modes import registered


def test_modes_lists_all_with_parameters_and_defaults(run: Run) -> None:
    listed = {mode["name"]: mode for mode in json.loads(run("modes", "--json").out)}
    assert list(listed) == list(registered())
    defaults = {param["name"]: param["default"] for param in listed["speculative"]["params"]}
    assert (defaults["tau"], defaults["index"]) == (None, None)
    assert defaults["pin_system"] is False
    text = run("modes").out
    assert "index      auto" in text
