"""``key=value`` arguments, and the history of prompts."""

import pytest

from kvchat.errors import UsageError
from kvchat.tui.prompt.arguments import parse_assignments, parse_literal, split_words
from kvchat.tui.prompt.history import MAX_BYTES, MAX_CHARACTERS, PromptHistory


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("0.8", 0.8), ("yes", True), ("off", False), ("word", "word"), ("-1.1", -1.1)]
)
def test_literals(text, value):
    assert parse_literal(text) == value


def test_assignments_need_an_equals_sign():
    assert parse_assignments(["budget=512", "first_full=no"]) == {"budget": 512, "first_full": False}
    with pytest.raises(UsageError, match="key=value"):
        parse_assignments(["512"])


def test_words_are_split_as_in_a_shell():
    assert split_words("a 'b c' d=\"e f\"") == ["a", "b c", "d=e f"]
    with pytest.raises(UsageError, match="quotation"):
        split_words("full 'budget=1")


# ---- The history of prompts, over several runs


def test_moving_through_history_keeps_the_draft():
    history = PromptHistory()
    for text in ("one", "two", "two"):
        history.add(text)
    assert [history.older("draft"), history.older("two"), history.older("one")] == ["two", "one", None]
    assert [history.newer("one, edited"), history.newer("two"), history.newer("draft")] == ["two", "draft", None]
    assert [history.older("draft"), history.older("two")] == ["two", "one, edited"]


def test_a_damaged_history_file_keeps_its_prompts(tmp_path):
    path = tmp_path / "state" / "history"
    PromptHistory(path).add("a\nb")
    path.write_bytes(path.read_bytes() + b'\xff not json\n{"a": 1}\n')
    history = PromptHistory(path)
    history.add("c")
    assert PromptHistory(path).entries == ["a\nb", "c"]


def test_huge_prompts_are_not_remembered():
    history = PromptHistory()
    history.add("x" * (MAX_CHARACTERS + 1))
    assert history.entries == []


def test_an_unwritable_file_keeps_history_in_memory(tmp_path):
    history = PromptHistory(tmp_path)  # a folder
    with pytest.raises(IsADirectoryError):
        history.add("one")
    assert history.older("") == "one"


def test_unicode_line_separators_survive(tmp_path):
    texts = ["a\u0085b", "a\u2028b", "a\u2029b", "a\x0bb\x0cc\x1dd", "a\r\nb"]
    history = PromptHistory(tmp_path / "history")
    for text in texts:
        history.add(text)
    assert PromptHistory(tmp_path / "history").entries == texts


def test_the_file_is_read_lazily(tmp_path):
    path = tmp_path / "history"
    history = PromptHistory(path)
    PromptHistory(path).add("by another")
    assert history.older("") == "by another"


def test_the_file_is_bounded_and_keeps_the_newest_prompts(tmp_path):
    path = tmp_path / "history"
    history = PromptHistory(path)
    for number in range(40):
        history.add(f"{number} " + "x" * (MAX_CHARACTERS - 10))
        assert path.stat().st_size <= MAX_BYTES
    saved = PromptHistory(path).entries
    assert saved == history.entries[-len(saved) :]
    assert len(saved) >= MAX_BYTES // 2 // MAX_CHARACTERS - 1


def test_an_oversized_old_file_is_trimmed(tmp_path):
    path = tmp_path / "history"
    path.write_bytes(b"".join(b'"%07d"\n' % number for number in range(3 * MAX_BYTES // 10)))
    history = PromptHistory(path)
    history.add("new")
    assert path.stat().st_size <= MAX_BYTES // 2
    assert PromptHistory(path).entries[-2:] == [f"{3 * MAX_BYTES // 10 - 1:07d}", "new"]


def test_only_the_owner_can_read_the_file(tmp_path):
    path = tmp_path / "state" / "history"
    PromptHistory(path).add("secret")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
