"""Values written ``key=value``."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.tui.prompt.arguments import parse_assignments, parse_literal, split_words


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("0.8", 0.8), ("yes", True), ("off", False), ("word", "word"), ("-1.1", -1.1)]
)
def test_literals(text, value):
    assert parse_literal(text) == value


def test_assignments_need_an_equals_sign():
    assert parse_assignments(["budget=512", "first_full=no"]) == {"budget": 512, "first_full": False}
    with pytest.raises(UsageError, match="key=value"):
        parse_assignments(["512"])


def test_words_are_split_as_a_shell_does():
    assert split_words("a 'b c' d=\"e f\"") == ["a", "b c", "d=e f"]
    with pytest.raises(UsageError, match="quotation"):
        split_words("full 'budget=1")
