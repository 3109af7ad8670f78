"""Beginnings of words."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError, resolve
from kvchat.tui.prompt.arguments import nearest

KNOWN = ("mode", "model", "K", "k", "stop", "stats")


@pytest.mark.parametrize(
    ("given", "word"), [("mode", "mode"), ("mo", "mode"), ("MODEL", "model"), ("k", "k"), ("K", "K"), ("sto", "stop")]
)
def test_a_word_or_its_beginning(given, word):
    assert resolve(given, KNOWN, "word") == word


@pytest.mark.parametrize(
    ("given", "reason"), [("st", "several: stats, stop"), ("stpo", 'no word "stpo".*"stop"'), ("", "no word")]
)
def test_several_or_none(given, reason):
    with pytest.raises(UsageError, match=reason):
        resolve(given, KNOWN, "word")


def test_only_a_few_are_near():
    assert nearest("compair", ("copy", "compare", "code", "quit", "compact")) == ["compare", "compact", "copy"]
    assert nearest("zzz", ("copy", "compare")) == []
