"""The text that stored ids stand for."""

from __future__ import annotations

from kvchat.engine.prompt import Stored


def test_stored_text_is_known_only_at_marks():
    stored = Stored()
    stored.extend([1, 2])
    stored.mark_text("ab")
    stored.extend([3, 4])
    stored.mark_text("abcd")
    assert stored.matched_prefix("abcde") == (4, 4)
    assert stored.matched_prefix("abc") == (2, 2)
    assert stored.matched_prefix("x") == (0, 0)
    assert [stored.matched_prefix_from("abcde", chars) for chars in (2, 3, 5)] == [(2, 2), (4, 4), None]
    assert stored.matched_prefix_from("abce", 3) is None
    stored.truncate(3)
    assert (stored.ids, stored.text, stored.marks) == ([1, 2, 3], "ab", [(2, 2)])
    stored.mark_text("aX")
    assert (stored.text, stored.marks) == ("aX", [(3, 2)])
