from __future__ import annotations

import os

from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import RESTORABLE_S, ConversationStore


def test_the_kv_of_a_conversation_go_and_come_with_it(tmp_path):
    store = ConversationStore(tmp_path / "chats.db")
    conversation = Conversation()
    conversation.ask("Hello")
    store.save(conversation.changes())
    file = tmp_path / "kv" / f"{conversation.id}.kv"
    file.parent.mkdir()
    file.write_bytes(b"pages")

    store.delete(conversation.id)
    assert not file.exists()
    store.restore(conversation.id)
    assert file.read_bytes() == b"pages"

    store.delete(conversation.id)
    store.close()
    (aside,) = file.parent.iterdir()
    ConversationStore(tmp_path / "chats.db").close()
    assert aside.exists()
    late = aside.stat().st_mtime - RESTORABLE_S - 1
    os.utime(aside, (late, late))
    ConversationStore(tmp_path / "chats.db").close()
    assert not aside.exists()
