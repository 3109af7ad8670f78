"""A database of any earlier version is brought up to date with everything in it."""

from __future__ import annotations

import sqlite3
import time

import pytest

from kvchat.conversations.store import MIGRATIONS, ConversationStore


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_database_of_an_earlier_version_keeps_what_is_in_it(tmp_path, version):
    path, now = tmp_path / "chats.db", time.time()
    old = sqlite3.connect(path)
    for statements in MIGRATIONS[:version]:
        for statement in statements:
            old.execute(statement)
    old.execute(
        "INSERT INTO conversation (id, title, created, updated, leaf) VALUES ('a', 'cats', ?, ?, 'm')", (now, now)
    )
    old.execute(
        "INSERT INTO message (id, conversation, role, text, created, ending, receipt)"
        " VALUES ('m', 'a', 'user', 'My cat is called Biscuit.', ?, '', '')",
        (now,),
    )
    old.execute(f"PRAGMA user_version = {version}")
    old.commit()
    old.close()
    for _ in range(2):  # the second time it is up to date
        store = ConversationStore(path)
        assert [(m.text, m.pinned) for m in store.load("a").path] == [("My cat is called Biscuit.", False)]
        assert [hit.title for hit in store.search("biscuit")] == ["cats"]
        store.close()
