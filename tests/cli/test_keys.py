"""kvchat keys."""

from __future__ import annotations

import json

from support.command_line import Run

from kvchat import files, paths
from kvchat.tui import actions


def test_keys_lists_the_actions_with_the_keys_of_the_settings(run: Run) -> None:
    files.write(paths.config_file(), b'[keys]\nmode.next = "f12"\nexport = "f11"\n')
    listed = {row["id"]: row for row in json.loads(run("keys", "--json").out)}
    assert set(listed) == set(actions.BY_ID)
    assert (listed["mode.next"]["keys"], listed["mode.next"]["default_keys"]) == (["f12"], ["f6"])
    assert (listed["export"]["keys"], listed["export"]["can_be_changed"]) == (["f11"], True)
    row = next(line for line in run("keys").out.splitlines() if "mode.next " in line)
    assert row.split()[:3] == ["F12", "mode.next", "/next"]
