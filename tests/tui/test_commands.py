"""The one table of commands."""

from __future__ import annotations

import pytest

from kvchat.config.modes import mode_infos, mode_names
from kvchat.errors import UsageError
from kvchat.tui.commands import TABLE, assignments, find, is_command, literal
from kvchat.tui.screens.help import mode_lines


def test_each_command_has_a_line_and_a_doc():
    for name, entry in TABLE.items():
        assert entry.line.startswith(f"/{name}")
        assert entry.doc
        assert "[" not in entry.line  # the palette reads it as markup


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("0.8", 0.8), ("yes", True), ("off", False), ("word", "word"), ("-1.1", -1.1)]
)
def test_literals(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/mode full", True),
        ("/no-such-thing", True),
        ("//literal", False),
        ("/system a\nb", True),
        ("/etc/hosts:\n1 localhost", False),
        ("what is /mode", False),
    ],
)
def test_what_is_a_command(text, command):
    assert is_command(text) is command


def test_assignments_need_an_equals_sign():
    assert assignments(["budget=512", "first_full=no"]) == {"budget": 512, "first_full": False}
    with pytest.raises(UsageError, match="key=value"):
        assignments(["512"])


def test_unknown_commands_name_the_nearest():
    with pytest.raises(UsageError, match='Did you mean "budget"'):
        find("buget")


def test_help_lists_every_mode_with_its_parameters():
    lines = dict(mode_lines(mode_infos()))
    assert set(mode_names()) <= set(lines)
    assert "  tau" in lines
