"""Names of keys."""

from __future__ import annotations

import pytest

from kvchat.tui.rebinding import describe_key, hint_key, is_key


@pytest.mark.parametrize(
    ("key", "name", "hint"),
    [
        ("f6", "F6", "F6"),
        ("shift+f6", "Shift+F6", "Shift+F6"),
        ("ctrl+p", "Ctrl+P", "^P"),
        ("escape", "Esc", "esc"),
        ("enter", "Enter", "⏎"),
        ("ctrl+pageup", "Ctrl+PgUp", "^PgUp"),
    ],
)
def test_names(key, name, hint):
    assert describe_key(key) == name
    assert hint_key(key) == hint


@pytest.mark.parametrize(("key", "known"), [("f9", True), ("alt+x", True), ("f99", False), ("x+ctrl", False)])
def test_known_keys(key, known):
    assert is_key(key) is known
