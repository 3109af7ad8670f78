"""Walking earlier prompts, over several runs."""

from __future__ import annotations

import pytest

from kvchat.tui.history import MAX_CHARACTERS, PromptHistory


def test_walking_back_and_forth_keeps_the_draft():
    history = PromptHistory()
    for text in ("one", "two", "two"):
        history.add(text)
    assert [history.older("draft"), history.older("two"), history.older("one")] == ["two", "one", None]
    assert [history.newer(), history.newer(), history.newer()] == ["two", "draft", None]


def test_a_file_keeps_multi_line_prompts_and_survives_damage(tmp_path):
    path = tmp_path / "state" / "history"
    PromptHistory(path).add("a\nb")
    path.write_bytes(path.read_bytes() + b'\xff not json\n{"a": 1}\n')
    history = PromptHistory(path)
    history.add("c")
    assert PromptHistory(path).entries == ["a\nb", "c"]


def test_huge_prompts_are_not_kept():
    history = PromptHistory()
    history.add("x" * (MAX_CHARACTERS + 1))
    assert history.entries == []


def test_an_unwritable_file_still_remembers_in_memory(tmp_path):
    history = PromptHistory(tmp_path)  # a folder
    with pytest.raises(IsADirectoryError):
        history.add("one")
    assert history.older("") == "one"
