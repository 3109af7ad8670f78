"""Saves a conversation as the application does."""

from __future__ import annotations

from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore


def save_changes(store: ConversationStore, conversation: Conversation) -> None:
    """Save the changes of a conversation, of which there must be some."""
    changes = conversation.changes()
    assert changes is not None
    store.save(changes)
    conversation.mark_saved(changes)
